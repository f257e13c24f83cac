// Loss and accuracy of a classifier, over ranks.
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

// Adds up what a rank sees.
class ScoreSums {
 public:
  explicit ScoreSums(at::Device device);

  // `logits` [B, classes], `labels` [B] of int64. Does not wait for the device.
  void Add(const at::Tensor& logits, const at::Tensor& labels);

  // Of all ranks' samples, the same everywhere. COLLECTIVE; waits for the
  // device. FailedPrecondition without samples.
  absl::StatusOr<Score> OverRanks(const tessera::World& world) const;

  // This rank's sums as text, for a checkpoint, to the bit. DataLoss.
  std::string State() const;
  absl::Status Load(absl::string_view state);

 private:
  at::Tensor sums_;  // [loss, correct, samples] of float64
};

// Logits and labels of some samples.
using Forward = std::function<std::pair<at::Tensor, at::Tensor>(
    absl::Span<const int64_t> samples)>;

// Of samples 0 to `samples` - 1: rank r takes each W-th, `batch` at a time, so
// that every one counts once (a sampler that pads would count some twice). All
// ranks call `forward` equally often, since at stage 3 it may be COLLECTIVE; of
// a rank that has none left it does not count. No gradients. COLLECTIVE.
absl::StatusOr<Score> Evaluate(const tessera::World& world, int64_t samples,
                               int64_t batch, const Forward& forward);

#endif  // EXAMPLES_VISION_SCORE_H_
