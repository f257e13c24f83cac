#include "data/distributed_sampler.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "absl/numeric/int128.h"
#include "absl/strings/str_cat.h"
#include "base/bits.h"
#include "base/check.h"

namespace tessera {
namespace {

class Splitmix64 {
 public:
  explicit Splitmix64(uint64_t state) : state_(state) {}

  uint64_t Next() { return MixBits(state_ += kMixStep); }

  // Returns a number uniform in [0, bound): the upper word of draw * bound,
  // where draws whose lower word is below 2^64 mod bound are thrown away.
  uint64_t Below(uint64_t bound) {
    const uint64_t reject_below = (0 - bound) % bound;
    for (;;) {
      const absl::uint128 product = absl::uint128(Next()) * bound;
      if (absl::Uint128Low64(product) >= reject_below) {
        return absl::Uint128High64(product);
      }
    }
  }

 private:
  uint64_t state_;
};

std::vector<int64_t> EpochOrder(const DistributedSamplerOptions& options,
                                int64_t epoch) {
  std::vector<int64_t> order(static_cast<size_t>(options.num_samples));
  std::iota(order.begin(), order.end(), int64_t{0});
  if (!options.shuffle) return order;
  // Seeds and epochs are small numbers: mixing keeps (0, 1) and (1, 0) apart.
  Splitmix64 random(MixBits(options.seed) ^
                    static_cast<uint64_t>(epoch) * kMixStep);
  for (size_t i = order.size() - 1; i > 0; --i) {
    std::swap(order[i], order[random.Below(i + 1)]);
  }
  return order;
}

}  // namespace

absl::StatusOr<DistributedSampler> DistributedSampler::Create(
    const DistributedSamplerOptions& options) {
  if (options.num_samples < 1) {
    return absl::InvalidArgumentError(absl::StrCat(
        "sampler: expected at least 1 sample, got ", options.num_samples));
  }
  if (options.rank < 0 || options.rank >= options.world_size) {
    return absl::InvalidArgumentError(
        absl::StrCat("sampler: expected a rank of 0 to world size - 1, got ",
                     options.rank, " of ", options.world_size));
  }
  if (options.drop_last && options.num_samples < options.world_size) {
    return absl::InvalidArgumentError(absl::StrCat(
        "sampler: ", options.num_samples, " samples are less than one for each",
        " of ", options.world_size, " ranks, and drop_last drops them all"));
  }
  return DistributedSampler(options);
}

DistributedSampler::DistributedSampler(const DistributedSamplerOptions& options)
    : options_(options) {
  FillIndices();
}

int64_t DistributedSampler::samples_per_rank() const {
  const int64_t world_size = options_.world_size;
  const int64_t rest = options_.num_samples - first_;
  const int64_t whole = rest / world_size;
  const bool ragged = rest % world_size != 0;
  return ragged && !options_.drop_last ? whole + 1 : whole;
}

void DistributedSampler::FillIndices() {
  const std::vector<int64_t> order = EpochOrder(options_, epoch_);
  indices_.resize(static_cast<size_t>(samples_per_rank()));
  int64_t place = first_ + options_.rank;
  for (int64_t& index : indices_) {
    // The modulus wraps the padding, several times if W > 2N.
    index = order[static_cast<size_t>(place % options_.num_samples)];
    place += options_.world_size;
  }
}

void DistributedSampler::Begin(int64_t epoch, int64_t first) {
  const bool same = epoch == epoch_ && first == first_;
  epoch_ = epoch;
  first_ = first;
  taken_ = 0;
  if (!same) FillIndices();
}

void DistributedSampler::SetEpoch(int64_t epoch) {
  TESSERA_CHECK_GE(epoch, 0);
  Begin(epoch, 0);
}

int64_t DistributedSampler::Next() {
  if (taken_ == samples_per_rank()) SetEpoch(epoch_ + 1);
  return indices_[static_cast<size_t>(taken_++)];
}

std::vector<int64_t> DistributedSampler::NextBatch(int64_t count) {
  std::vector<int64_t> batch;
  batch.reserve(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) batch.push_back(Next());
  return batch;
}

// The end of an epoch counts as the beginning of the next, since its padding
// depends on the world size.
SamplerState DistributedSampler::state() const {
  if (taken_ == samples_per_rank()) return {epoch_ + 1, 0};
  return {epoch_, first_ + taken_ * options_.world_size};
}

absl::Status DistributedSampler::Seek(const SamplerState& state) {
  if (state.epoch < 0 || state.position < 0 ||
      state.position >= options_.num_samples) {
    return absl::InvalidArgumentError(
        absl::StrCat("sampler: cannot go to sample ", state.position,
                     " of epoch ", state.epoch, ", there are ",
                     options_.num_samples, "; is it other data?"));
  }
  Begin(state.epoch, state.position % options_.world_size);
  taken_ = std::min(state.position / options_.world_size, samples_per_rank());
  return absl::OkStatus();
}

}  // namespace tessera
