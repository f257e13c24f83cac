// DistributedSampler decides which samples this rank sees, in which order. It
// is torch's DistributedSampler with an order of our own.
//
//   epoch order  p = permutation(seed, epoch) of 0..N-1, or 0..N-1 unshuffled
//   padded       p0 p1 p2 p3 p4 | p0       N = 5, W = 2: to W * ceil(N/W)
//   rank 0       p0    p2    p4            rank r takes p[r], p[r+W], ...
//   rank 1          p1    p3    p0
//
// With drop_last the padded order is cut to W * floor(N/W) instead.
//
// The permutation depends on seed, epoch and N alone, not on rank, world size,
// library or machine. So the samples of one global batch are identical at every
// world size that divides it.
//
// A different number of ranks that resumes in the middle of an epoch takes what
// is left, p[position], p[position+1], ..., in rounds of its own: each sample
// that nobody has seen comes once, however many ranks there were before.
//
// Note [Shuffle]. The shuffle is Fisher-Yates from the end (for i = N-1 .. 1
// swap p[i] with p[j], j uniform in 0..i) on splitmix64, started at mix(seed) ^
// (epoch * 0x9E3779B97F4A7C15); j is drawn by multiplication with rejection (no
// bias). A change of this changes every training run.
//
// Threads: the caller serializes the calls. LOCAL throughout: ranks agree by
// their options.
#ifndef DATA_DISTRIBUTED_SAMPLER_H_
#define DATA_DISTRIBUTED_SAMPLER_H_

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"

namespace tessera {

struct DistributedSamplerOptions {
  int64_t num_samples = 0;  // N, of the whole set; at least 1
  int rank = 0;
  int world_size = 1;
  bool shuffle = true;
  uint64_t seed = 0;       // must be the same on all ranks
  bool drop_last = false;  // cut the ragged end instead of padding it
};

// SamplerState is where ranks that run in step are, the same on all: together
// they have taken `position` samples of epoch `epoch`, always fewer than it
// has. So it means the same place at any world size.
struct SamplerState {
  int64_t epoch = 0;
  int64_t position = 0;
};
inline bool operator==(const SamplerState& a, const SamplerState& b) {
  return a.epoch == b.epoch && a.position == b.position;
}

class DistributedSampler {
 public:
  // Starts at epoch 0, position 0. Takes O(N) time and memory here and at each
  // new epoch, and keeps 8 N / W bytes. Returns InvalidArgument for num_samples
  // < 1, a rank outside 0..W-1, or drop_last with fewer samples than ranks.
  static absl::StatusOr<DistributedSampler> Create(
      const DistributedSamplerOptions& options);

  // Returns the next sample; the last one of an epoch is followed by the first
  // of the next.
  int64_t Next();
  // Returns the next `count` samples, across the end of an epoch if need be, so
  // that every batch is full.
  std::vector<int64_t> NextBatch(int64_t count);

  // Moves to the start of `epoch`. REQUIRES: epoch >= 0.
  void SetEpoch(int64_t epoch);

  // Returns what Seek needs to resume with the sample that Next() would return
  // now.
  SamplerState state() const;
  // Moves to a state. Returns InvalidArgument if the state does not fit a set
  // of this many samples.
  absl::Status Seek(const SamplerState& state);

  // Returns this rank's samples of the current epoch, in order; valid until the
  // epoch changes or the next Seek.
  absl::Span<const int64_t> indices() const { return indices_; }
  int64_t samples_per_rank() const;

 private:
  explicit DistributedSampler(const DistributedSamplerOptions& options);
  void FillIndices();
  // Begins an epoch whose rounds start at its sample `first`.
  void Begin(int64_t epoch, int64_t first);

  DistributedSamplerOptions options_;
  int64_t epoch_ = 0;
  int64_t first_ = 0;
  int64_t taken_ = 0;             // of this rank's samples of the epoch
  std::vector<int64_t> indices_;  // [samples_per_rank], of the epoch
};

}  // namespace tessera
#endif  // DATA_DISTRIBUTED_SAMPLER_H_
