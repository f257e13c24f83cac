// NameMap: what another program calls the tensors of a model, both ways. A text
// of rules, one a line:
//
//   # examples/gpt, as transformers' GPT2LMHeadModel
//   token.weight           transformer.wte.weight
//   blocks.*.qkv.weight    transformer.h.*.attn.c_attn.weight   transposed
//   rotary.*               -
//
// `*` stands for one or more characters without a dot, at most once a name, and
// for the same on both sides. `transposed`: a matrix that the other has with
// its two dimensions exchanged. "-": the other has none. The first rule that
// fits counts; what no rule fits has the same name there. No torch.
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

  // Nothing is renamed.
  NameMap() = default;
  // InvalidArgument names `where` and the line.
  static absl::StatusOr<NameMap> Parse(absl::string_view text,
                                       absl::string_view where);
  // "gpt2", or the path of a file of rules. NotFound, InvalidArgument.
  static absl::StatusOr<NameMap> Load(const std::string& name_or_path);

  Name Theirs(absl::string_view ours) const;
  // The way back: what we call a tensor of theirs, if Theirs of that is its
  // name; "" otherwise, where no one name of ours is meant.
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
