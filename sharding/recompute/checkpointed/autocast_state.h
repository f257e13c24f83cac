// AutocastState: captures a thread's autocast state, and a scope restores it
// for a while. At its end the previous state is set, whatever was set within by
// calls: a run that is stopped early resets nothing.
//
// Within the scope autocast's cache is off. The cache would change only nodes
// of a graph that has no backward, never a value; and the casts of inputs that
// it would store would stay until the user's own autocast ends, on whatever
// thread.
#ifndef SHARDING_RECOMPUTE_CHECKPOINTED_AUTOCAST_STATE_H_
#define SHARDING_RECOMPUTE_CHECKPOINTED_AUTOCAST_STATE_H_

#include <vector>

#include "c10/core/DeviceType.h"
#include "c10/core/ScalarType.h"

namespace tessera {

class AutocastState {
 public:
  static AutocastState Capture();
  void Set() const;

 private:
  struct Device {
    c10::DeviceType type;
    bool on;
    c10::ScalarType dtype;
  };
  std::vector<Device> devices_;
};

class AutocastStateScope {
 public:
  explicit AutocastStateScope(const AutocastState& state);
  ~AutocastStateScope();
  AutocastStateScope(const AutocastStateScope&) = delete;
  AutocastStateScope& operator=(const AutocastStateScope&) = delete;

 private:
  const AutocastState before_;
  const bool cache_before_;
  const int nesting_before_;
};

}  // namespace tessera
#endif  // SHARDING_RECOMPUTE_CHECKPOINTED_AUTOCAST_STATE_H_
