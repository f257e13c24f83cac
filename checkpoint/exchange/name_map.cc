#include "checkpoint/exchange/name_map.h"

#include <algorithm>
#include <optional>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/file.h"
#include "base/status.h"

namespace tessera {
namespace {

// Maps the module of examples/gpt to transformers' GPT2LMHeadModel with
// activation_function "gelu" and tie_word_embeddings false. Its Conv1D is a
// Linear with its weight transposed.
constexpr char kGpt2[] = R"(
token.weight           transformer.wte.weight
position.weight        transformer.wpe.weight
blocks.*.norm1.weight  transformer.h.*.ln_1.weight
blocks.*.norm1.bias    transformer.h.*.ln_1.bias
blocks.*.qkv.weight    transformer.h.*.attn.c_attn.weight  transposed
blocks.*.qkv.bias      transformer.h.*.attn.c_attn.bias
blocks.*.out.weight    transformer.h.*.attn.c_proj.weight  transposed
blocks.*.out.bias      transformer.h.*.attn.c_proj.bias
blocks.*.norm2.weight  transformer.h.*.ln_2.weight
blocks.*.norm2.bias    transformer.h.*.ln_2.bias
blocks.*.up.weight     transformer.h.*.mlp.c_fc.weight     transposed
blocks.*.up.bias       transformer.h.*.mlp.c_fc.bias
blocks.*.down.weight   transformer.h.*.mlp.c_proj.weight   transposed
blocks.*.down.bias     transformer.h.*.mlp.c_proj.bias
norm.weight            transformer.ln_f.weight
norm.bias              transformer.ln_f.bias
head.weight            lm_head.weight
)";

// Returns what `*` of the pattern stands for; nullopt if the name does not
// match.
std::optional<absl::string_view> Fit(absl::string_view pattern,
                                     absl::string_view name) {
  const size_t star = pattern.find('*');
  if (star == absl::string_view::npos) {
    if (pattern != name) return std::nullopt;
    return absl::string_view();
  }
  const absl::string_view before = pattern.substr(0, star);
  const absl::string_view after = pattern.substr(star + 1);
  if (name.size() <= before.size() + after.size() ||
      !absl::StartsWith(name, before) || !absl::EndsWith(name, after)) {
    return std::nullopt;
  }
  const absl::string_view inner =
      name.substr(before.size(), name.size() - before.size() - after.size());
  if (absl::StrContains(inner, '.')) return std::nullopt;
  return inner;
}

}  // namespace

absl::StatusOr<NameMap> NameMap::Parse(absl::string_view text,
                                       absl::string_view where) {
  NameMap map;
  int number = 0;
  for (const absl::string_view line : absl::StrSplit(text, '\n')) {
    ++number;
    const std::vector<std::string> words =
        absl::StrSplit(std::string(line.substr(0, line.find('#'))),
                       absl::ByAnyChar(" \t\r"), absl::SkipEmpty());
    if (words.empty()) continue;
    const auto stars = [](const std::string& word) {
      return std::count(word.begin(), word.end(), '*');
    };
    const bool good =
        (words.size() == 2 ||
         (words.size() == 3 && words[2] == "transposed" && words[1] != "-")) &&
        stars(words[0]) <= 1 && stars(words[1]) <= stars(words[0]);
    if (!good) {
      return absl::InvalidArgumentError(absl::StrCat(
          where, ":", number,
          ": expected 'ours theirs' or 'ours theirs "
          "transposed', with at most one * on the left, and on the right only "
          "if there is one on the left; got '",
          line, "'"));
    }
    map.rules_.push_back({words[0], words[1], words.size() == 3});
  }
  return map;
}

absl::StatusOr<NameMap> NameMap::Load(const std::string& name_or_path) {
  if (name_or_path == "gpt2") return Parse(kGpt2, "gpt2");
  TESSERA_ASSIGN_OR_RETURN(
      const std::string text,
      ReadRegularFile(name_or_path, /*max_bytes=*/int64_t{16} << 20));
  return Parse(text, name_or_path);
}

NameMap::Name NameMap::Theirs(absl::string_view ours) const {
  for (const Rule& rule : rules_) {
    const std::optional<absl::string_view> star = Fit(rule.ours, ours);
    if (!star.has_value()) continue;
    if (rule.theirs == "-") return {};
    std::string name = rule.theirs;
    const size_t at = name.find('*');
    if (at != std::string::npos) name.replace(at, 1, std::string(*star));
    return {std::move(name), rule.transposed};
  }
  return {std::string(ours), false};
}

NameMap::Name NameMap::Ours(absl::string_view theirs) const {
  const auto leads_back = [&](const std::string& ours, bool transposed) {
    const Name there = Theirs(ours);
    return there.name == theirs && there.transposed == transposed;
  };
  for (const Rule& rule : rules_) {
    if (rule.theirs == "-") continue;
    const std::optional<absl::string_view> star = Fit(rule.theirs, theirs);
    if (!star.has_value()) continue;
    std::string name = rule.ours;
    const size_t at = name.find('*');
    if (at != std::string::npos) {
      if (star->empty()) continue;  // of any
      name.replace(at, 1, std::string(*star));
    }
    if (leads_back(name, rule.transposed)) return {name, rule.transposed};
  }
  if (leads_back(std::string(theirs), false)) return {std::string(theirs)};
  return {};
}

}  // namespace tessera
