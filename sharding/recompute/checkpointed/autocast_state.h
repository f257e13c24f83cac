// AutocastState: which autocast a thread is under, and a scope with the same,
// after which it is as before, whatever was set within by calls: a run that is
// stopped sets nothing back.
//
// Within the scope autocast's cache is off. What the cache would change are the
// nodes of a graph that nobody goes back through, never a value; and what it
// would take in there, casts of inputs and of their graph, would stay until the
// user's own autocast ends, of whatever thread.
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
