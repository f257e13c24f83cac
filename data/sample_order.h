// SampleOrder decides in which order a rank takes its samples.
//
// The ranks of a job each have one of their own and take from it in step.
// State() is then the same on all, and means the same place at any number of
// ranks: after a Seek, what nobody has taken comes exactly once.
//
// Threads: the caller serializes the calls. LOCAL throughout.
#ifndef DATA_SAMPLE_ORDER_H_
#define DATA_SAMPLE_ORDER_H_

#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace tessera {

struct Sample {
  int64_t index = 0;  // of the whole set
  int64_t epoch = 0;  // how often the set has been gone through before
  // Whether it comes a second time in its epoch, so that this rank has as many
  // samples as the others.
  bool padding = false;
};

class SampleOrder {
 public:
  // LeftInEpoch returns this where nothing ends.
  static constexpr int64_t kEndless = std::numeric_limits<int64_t>::max();

  virtual ~SampleOrder() = default;

  // Returns the next `count` samples, across the end of an epoch if need be.
  // May take long where an epoch begins. REQUIRES: count > 0.
  virtual std::vector<Sample> NextBatch(int64_t count) = 0;

  // Returns the epoch of the sample that comes next.
  virtual int64_t epoch() const = 0;
  // Returns the number of this rank's samples before the epoch ends, the same
  // on all ranks; at least 1.
  virtual int64_t LeftInEpoch() const = 0;
  // Moves to the start of `epoch`. Returns InvalidArgument if there is no such
  // epoch.
  virtual absl::Status SetEpoch(int64_t epoch) = 0;

  // Returns what Seek needs to resume with the sample that would come next:
  // short text without line breaks, the same on all ranks.
  virtual std::string State() const = 0;
  // Moves to a state, at any number of ranks. After an error the place is
  // unchanged. Returns DataLoss for text that State did not write, and
  // FailedPrecondition for a state of another order or other data, naming both.
  virtual absl::Status Seek(absl::string_view state) = 0;
};

}  // namespace tessera
#endif  // DATA_SAMPLE_ORDER_H_
