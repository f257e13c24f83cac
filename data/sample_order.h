// SampleOrder: in which order a rank takes its samples, as a loader sees it.
//
// The ranks of a job each have one of their own and take from it in step. What
// State() says is then the same on all, and stands for the same place at any
// number of ranks: what nobody has taken comes exactly once after a Seek.
//
// Threads: outside order needed. LOCAL throughout.
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
  // It comes a second time in its epoch, for this rank to have as many as the
  // others have.
  bool padding = false;
};

class SampleOrder {
 public:
  // What LeftInEpoch says where nothing ends.
  static constexpr int64_t kEndless = std::numeric_limits<int64_t>::max();

  virtual ~SampleOrder() = default;

  // The next `count` samples, over the end of an epoch if need be. May take
  // long where an epoch begins. REQUIRES: count > 0.
  virtual std::vector<Sample> NextBatch(int64_t count) = 0;

  // Of the sample that comes next.
  virtual int64_t epoch() const = 0;
  // This rank's samples before the epoch ends, the same on all ranks; at least
  // 1.
  virtual int64_t LeftInEpoch() const = 0;
  // To the start of `epoch`. InvalidArgument if there is no such.
  virtual absl::Status SetEpoch(int64_t epoch) = 0;

  // What Seek needs to go on with the sample that would come next: short text
  // without line breaks, the same on all ranks.
  virtual std::string State() const = 0;
  // At any number of ranks. Errors, after which the place is what it was:
  // DataLoss for text that is none of State's, FailedPrecondition for a state
  // of another order or other data, naming both.
  virtual absl::Status Seek(absl::string_view state) = 0;
};

}  // namespace tessera
#endif  // DATA_SAMPLE_ORDER_H_
