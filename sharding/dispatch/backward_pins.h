// BackwardPins: pins that last longer than an operator or a node, for
// parameters that are used again soon in the same backward.
//
// They stay within the flats' own limit of live parameters; flats that are
// freed at once (a limit of 0) are not pinned.
//
// Threads: any.
#ifndef SHARDING_DISPATCH_BACKWARD_PINS_H_
#define SHARDING_DISPATCH_BACKWARD_PINS_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "sharding/flat/flat_parameter.h"

namespace tessera {

class BackwardPins {
 public:
  BackwardPins();
  ~BackwardPins();
  BackwardPins(const BackwardPins&) = delete;
  BackwardPins& operator=(const BackwardPins&) = delete;

  // Adds a pin, unless that would exceed the limit. REQUIRES: the flat is
  // pinned. LOCAL.
  void Add(const std::shared_ptr<FlatParameter>& flat);
  void Release();

  // Releases all BackwardPins of the process. Call when no backward runs.
  static void ReleaseAll();

 private:
  absl::Mutex mutex_;
  std::vector<std::shared_ptr<FlatParameter>> flats_ ABSL_GUARDED_BY(mutex_);
  int64_t numel_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace tessera
#endif  // SHARDING_DISPATCH_BACKWARD_PINS_H_
