// AtenNames: a set of libtorch's own operators, in one literal.
//
//   static const auto* const names = new AtenNames("mm,addmm,bmm");
//   names->Contains("aten::mm")
#ifndef BASE_TORCH_ATEN_NAMES_H_
#define BASE_TORCH_ATEN_NAMES_H_

#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"

namespace tessera {

class AtenNames {
 public:
  // `words` is a literal; a comma is between words.
  explicit AtenNames(absl::string_view words)
      : names_(absl::StrSplit(words, ',')) {}

  bool Contains(absl::string_view op) const {
    return absl::ConsumePrefix(&op, "aten::") && names_.contains(op);
  }

 private:
  const absl::flat_hash_set<absl::string_view> names_;
};

}  // namespace tessera
#endif  // BASE_TORCH_ATEN_NAMES_H_
