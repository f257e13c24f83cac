#include "optim/norm/grad_norm.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "ATen/ops/cat.h"
#include "ATen/ops/view_as_real.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "base/bits.h"
#include "base/check.h"
#include "base/status.h"
#include "base/torch/torch_scope.h"
#include "comm/communicator.h"
#include "optim/norm/block_powers.h"

namespace tessera {
namespace {

// Elements that are turned into block sums at once.
constexpr int64_t kChunk = int64_t{1} << 22;
static_assert(kChunk % kNormBlock == 0, "chunks are whole blocks");

// NaN beats all; there is only one NaN, so that equal sums have equal texts.
double Greater(double a, double b) {
  if (std::isnan(a) || std::isnan(b)) {
    return std::numeric_limits<double>::quiet_NaN();
  }
  return std::max(a, b);
}

std::string HexFingerprint(absl::string_view text) {
  return absl::StrCat(
      absl::Hex(Fingerprint(text.data(), static_cast<int64_t>(text.size())),
                absl::kZeroPad16));
}

absl::Status Damaged(absl::string_view text) {
  return absl::DataLossError(absl::StrCat(
      "gradient norm: expected what NormSum::Serialize of the same build gives,"
      " got '",
      text, "'; see that all ranks run one build"));
}

std::string Ranks(int64_t begin, int64_t end) {
  return end - begin == 1 ? absl::StrCat("rank ", begin)
                          : absl::StrCat("ranks ", begin, " to ", end - 1);
}

}  // namespace

NormSum::NormSum(double p) : p_(p) { TESSERA_CHECK(p > 0) << p; }

// Why blocks. Adding every element exactly would be slow, and adding them in
// floating point gives other bits for each way of cutting the parameters into
// shards. So 64 neighbours are added in floating point, always
// the same ones (shards are cut between blocks, never within), and only the
// sums of blocks are added exactly. An infinity or a NaN has no place in an
// exact sum: it is kept apart, and wins.
void NormSum::Add(const at::Tensor& segment, int64_t first) {
  TESSERA_CHECK(segment.dim() == 1 && segment.is_contiguous() && first >= 0)
      << segment.sizes() << " at " << first;
  TorchScope scope;
  if (segment.is_complex() && p_ == 2) {
    return Add(at::view_as_real(segment).flatten(), 2 * first);
  }
  const int64_t numel = segment.numel();
  for (int64_t begin = 0, end; begin < numel; begin = end) {
    end = std::min(numel, ((first + begin) / kChunk + 1) * kChunk - first);
    const at::Tensor part = segment.narrow(0, begin, end - begin);
    if (!segment.is_cpu()) {
      on_device_.push_back(BlockPowersByOperators(part, first + begin, p_));
      continue;
    }
    for (const double block : BlockPowers(part, first + begin, p_)) {
      AddBlock(block);
    }
  }
}

void NormSum::AddBlock(double block) {
  if (std::isinf(p_) || !std::isfinite(block)) {
    extreme_ = Greater(extreme_, block);
  } else {
    sum_.Add(block);
  }
}

void NormSum::Finish() {
  if (on_device_.empty()) return;
  TorchScope scope;
  const at::Tensor blocks = at::cat(std::exchange(on_device_, {})).cpu();
  const double* const data = blocks.const_data_ptr<double>();
  for (int64_t i = 0; i < blocks.numel(); ++i) AddBlock(data[i]);
}

std::string NormSum::Serialize() const {
  TESSERA_CHECK(on_device_.empty()) << "before Finish";
  const std::string text = absl::StrCat(HexFloat(p_), " ", HexFloat(extreme_),
                                        " ", sum_.Text(), " ");
  return absl::StrCat(text, HexFingerprint(text));
}

absl::Status NormSum::Merge(absl::string_view text) {
  const std::vector<absl::string_view> fields = absl::StrSplit(text, ' ');
  if (fields.size() != 4 ||
      fields[3] != HexFingerprint(text.substr(0, text.size() - 16))) {
    return Damaged(text);
  }
  if (fields[0] != HexFloat(p_)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "gradient norm: expected a sum of p = ", p_, " (", HexFloat(p_),
        "), got p = ", fields[0], "; let all ranks take the same p"));
  }
  const absl::StatusOr<double> extreme = ParseHexDouble(fields[1]);
  const absl::StatusOr<ExactSum> sum = ExactSum::Parse(fields[2]);
  if (!extreme.ok() || *extreme < 0 || !sum.ok()) return Damaged(text);
  extreme_ = Greater(extreme_, *extreme);
  sum_.Add(*sum);
  return absl::OkStatus();
}

double NormSum::Norm() const {
  if (std::isinf(p_) || extreme_ != 0) return extreme_;
  const double sum = sum_.Round();
  if (p_ == 1) return sum;
  if (p_ == 2) return std::sqrt(sum);
  // In long double, 1/p is exact enough for the last bit of a double.
  return static_cast<double>(std::pow(static_cast<long double>(sum),
                                      1 / static_cast<long double>(p_)));
}

absl::Status SumOverRanks(const RankCopies& copies, const CommTag& tag,
                          Communicator* comm, std::vector<NormSum>* sums) {
  std::vector<std::string> texts;
  for (const NormSum& sum : *sums) texts.push_back(sum.Serialize());
  TESSERA_ASSIGN_OR_RETURN(
      const std::vector<std::string> ranks,
      comm->AllGatherStrings(absl::StrJoin(texts, "\n"), tag));
  std::vector<NormSum> first;
  for (int64_t copy = 0; copy < copies.copies; ++copy) {
    std::vector<NormSum> group;
    for (const NormSum& sum : *sums) group.emplace_back(sum.p());
    for (size_t rank = 0; rank < ranks.size(); ++rank) {
      if (copies.CopyOf(static_cast<int64_t>(rank)) != copy) continue;
      const std::vector<absl::string_view> theirs =
          absl::StrSplit(ranks[rank], '\n');
      if (theirs.size() != group.size()) {
        return absl::DataLossError(absl::StrCat(
            tag.what, ": expected ", group.size(), " sums of each rank, got ",
            theirs.size(), "; see that all ranks run one build"));
      }
      for (size_t i = 0; i < group.size(); ++i) {
        TESSERA_RETURN_IF_ERROR(group[i].Merge(theirs[i]));
      }
    }
    if (copy == 0) {
      first = std::move(group);
      continue;
    }
    for (size_t i = 0; i < group.size(); ++i) {
      if (group[i].Serialize() == first[i].Serialize()) continue;
      return ReplicasDiffer(copy * copies.neighbours, copies.neighbours);
    }
  }
  *sums = std::move(first);
  return absl::OkStatus();
}

absl::Status ReplicasDiffer(int64_t first, int64_t group_size) {
  return absl::InternalError(absl::StrCat(
      "Step: the reduced gradients of ", Ranks(first, first + group_size),
      " are not those of ", Ranks(0, group_size),
      ", whose replicas they are (sharding.shard_group_size ", group_size,
      "): a collective gave other bits on other ranks; continue from a "
      "checkpoint"));
}

double ClipCoefficient(double norm, double max_norm) {
  const double divisor = norm + 1e-6;
  return max_norm > 0 && divisor > max_norm ? max_norm / divisor : 1;
}

}  // namespace tessera
