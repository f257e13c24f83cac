#include "optim/gradients/non_finite.h"

#include <algorithm>
#include <map>
#include <utility>

#include "ATen/ops/isfinite.h"
#include "ATen/ops/isnan.h"
#include "ATen/ops/stack.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "base/status.h"
#include "base/torch/torch_scope.h"
#include "base/torch_guard.h"
#include "optim/gradients/owned_gradients.h"

namespace tessera {
namespace {

using Flats = std::vector<std::shared_ptr<FlatParameter>>;

// Elements that are looked at at once.
constexpr int64_t kReadAtOnce = int64_t{1} << 22;

// NaNs, and all that are not finite: int64 [2], where the segment is.
at::Tensor CountIn(const at::Tensor& segment) {
  at::Tensor counts;
  for (int64_t begin = 0; begin < segment.numel(); begin += kReadAtOnce) {
    const at::Tensor part = segment.narrow(
        0, begin, std::min(kReadAtOnce, segment.numel() - begin));
    const at::Tensor both = at::stack(
        {at::isnan(part).sum(), at::isfinite(part).logical_not().sum()});
    counts = counts.defined() ? counts + both : both;
  }
  return counts;
}

// Counts in this rank's shards: a line "index NaN infinite" for each parameter.
absl::StatusOr<std::string> CountMine(const Flats& flats,
                                      const Gradients& gradients) {
  constexpr char kWhat[] = "look for overflows";
  std::vector<int64_t> indices;
  std::vector<at::Tensor> counts;
  TESSERA_RETURN_IF_ERROR(VisitShards(
      kWhat, flats, gradients, [&](const auto&, const GradientParts& parts) {
        for (const GradientPart& part : parts) {
          indices.push_back(static_cast<int64_t>(part.parameter.index));
          counts.push_back(CountIn(part.values));
        }
      }));
  return CatchTorch(kWhat, [&] {
    TorchScope scope;
    std::string text;
    if (counts.empty()) return text;
    const at::Tensor on_host = at::stack(counts).cpu();
    const int64_t* const data = on_host.const_data_ptr<int64_t>();
    for (size_t i = 0; i < indices.size(); ++i) {
      const int64_t nan = data[2 * i], all = data[2 * i + 1];
      if (all == 0) continue;
      absl::StrAppend(&text, indices[i], " ", nan, " ", all - nan, "\n");
    }
    return text;
  });
}

// By number of the parameter.
using Found = std::map<int64_t, NonFiniteGradient>;

absl::Status Merge(const std::string& text, int rank, Found* found) {
  for (const absl::string_view line :
       absl::StrSplit(text, '\n', absl::SkipEmpty())) {
    const std::vector<absl::string_view> words = absl::StrSplit(line, ' ');
    int64_t index = 0, nan = 0, infinite = 0;
    if (words.size() != 3 || !absl::SimpleAtoi(words[0], &index) ||
        !absl::SimpleAtoi(words[1], &nan) ||
        !absl::SimpleAtoi(words[2], &infinite)) {
      return absl::DataLossError(absl::StrCat(
          "look for overflows: expected a parameter and two counts of rank ",
          rank, ", got '", line, "'; see that all ranks run one build"));
    }
    NonFiniteGradient& gradient = (*found)[index];
    gradient.nan_numel += nan;
    gradient.infinite_numel += infinite;
    gradient.ranks.push_back(rank);
  }
  return absl::OkStatus();
}

}  // namespace

// An error of one rank, a disk's, say, is told before the exchange, in which
// the others would wait for it.
absl::StatusOr<std::vector<NonFiniteGradient>> FindNonFinite(
    const Flats& flats, const Gradients& gradients, Communicator* comm) {
  std::vector<NonFiniteGradient> list;
  if (flats.empty()) return list;
  const absl::StatusOr<std::string> mine = CountMine(flats, gradients);
  TESSERA_RETURN_IF_ERROR(comm->AgreeOk(mine.status(), "look for overflows"));
  TESSERA_ASSIGN_OR_RETURN(
      const std::vector<std::string> all,
      comm->AllGatherStrings(*mine, CommTag{"gradients that are not finite"}));
  Found found;
  const RankCopies copies = CopiesOver(*flats[0], *comm);
  for (int rank = 0; rank < comm->world_size(); ++rank) {
    if (copies.CopyOf(rank) != 0) continue;
    TESSERA_RETURN_IF_ERROR(
        Merge(all[static_cast<size_t>(rank)], rank, &found));
  }
  for (const auto& flat : flats) {
    for (const FlatParameter::Parameter& p : flat->parameters()) {
      const auto it = found.find(static_cast<int64_t>(p.index));
      if (it == found.end()) continue;
      it->second.parameter = p.name;
      it->second.unit = flat->name();
    }
  }
  for (auto& [index, gradient] : found) list.push_back(std::move(gradient));
  return list;
}

std::string DescribeNonFinite(absl::Span<const NonFiniteGradient> gradients,
                              size_t most) {
  std::vector<std::string> texts;
  for (const NonFiniteGradient& g : gradients.subspan(0, most)) {
    texts.push_back(absl::StrCat(
        "'", g.parameter, "' of unit '", g.unit, "' (", g.nan_numel, " NaN, ",
        g.infinite_numel, " infinite; in the ",
        g.ranks.size() == 1 ? "shard of rank " : "shards of ranks ",
        absl::StrJoin(g.ranks, ", "), ")"));
  }
  std::string text = absl::StrJoin(texts, ", ");
  if (gradients.size() > most) {
    absl::StrAppend(&text, " and ", gradients.size() - most, " more");
  }
  return text;
}

}  // namespace tessera
