// Computes loss and accuracy of a classifier over ranks.
#ifndef EXAMPLES_VISION_SCORE_H_
#define EXAMPLES_VISION_SCORE_H_

#include <cstdint>
#include <functional>
#include <string>
#include <utility>

#include "ATen/core/Tensor.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "comm/world/world.h"

struct Score {
  double loss = 0;      // mean cross entropy
  double accuracy = 0;  // 0 to 1
  int64_t samples = 0;
};

// ScoreSums adds up what a rank sees.
class ScoreSums {
 public:
  explicit ScoreSums(at::Device device);

  // Adds `logits` [B, classes] and `labels` [B] of int64. Does not wait for the
  // device.
  void Add(const at::Tensor& logits, const at::Tensor& labels);

  // Returns the score of all ranks' samples, identical on all. COLLECTIVE;
  // waits for the device. Returns FailedPrecondition if there are no samples.
  absl::StatusOr<Score> OverRanks(const tessera::World& world) const;

  // State returns this rank's sums as text that Load reads to the bit, for a
  // checkpoint. DataLoss.
  std::string State() const;
  absl::Status Load(absl::string_view state);

 private:
  at::Tensor sums_;  // [loss, correct, samples] of float64
};

// Returns logits and labels of some samples.
using Forward = std::function<std::pair<at::Tensor, at::Tensor>(
    absl::Span<const int64_t> samples)>;

// Scores samples 0 to `samples` - 1: rank r takes each W-th, `batch` at a time,
// so that every sample counts once (a sampler that pads would count some
// twice). All ranks call `forward` equally often, since at stage 3 it may be
// COLLECTIVE; the results of a rank that has no samples left are ignored.
// Computes no gradients. COLLECTIVE.
absl::StatusOr<Score> Evaluate(const tessera::World& world, int64_t samples,
                               int64_t batch, const Forward& forward);

#endif  // EXAMPLES_VISION_SCORE_H_
