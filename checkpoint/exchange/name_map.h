// NameMap translates between our names of a model's tensors and another
// program's. It is a text of rules, one a line:
//
//   # examples/gpt, as transformers' GPT2LMHeadModel
//   token.weight           transformer.wte.weight
//   blocks.*.qkv.weight    transformer.h.*.attn.c_attn.weight   transposed
//   rotary.*               -
//
// `*` stands for one or more characters without a dot, at most once in a name,
// and for the same text on both sides. `transposed`: the other program stores
// the matrix with its two dimensions exchanged. "-": the other program has no
// such tensor. The first matching rule counts; a name that no rule matches is
// the same there. No torch.
#ifndef CHECKPOINT_EXCHANGE_NAME_MAP_H_
#define CHECKPOINT_EXCHANGE_NAME_MAP_H_

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace tessera {

class NameMap {
 public:
  struct Name {
    std::string name;  // "": there is none
    bool transposed = false;
  };

  // Makes a map that renames nothing.
  NameMap() = default;
  // Parses rules. Returns InvalidArgument naming `where` and the line.
  static absl::StatusOr<NameMap> Parse(absl::string_view text,
                                       absl::string_view where);
  // Loads the map "gpt2", or the rules in the file of that path. Returns
  // NotFound or InvalidArgument.
  static absl::StatusOr<NameMap> Load(const std::string& name_or_path);

  Name Theirs(absl::string_view ours) const;
  // Returns our name of the tensor that they call `theirs`, such that Theirs
  // returns `theirs` for it; "" if there is not exactly one.
  Name Ours(absl::string_view theirs) const;

 private:
  struct Rule {
    std::string ours, theirs;
    bool transposed = false;
  };
  std::vector<Rule> rules_;
};

}  // namespace tessera
#endif  // CHECKPOINT_EXCHANGE_NAME_MAP_H_
