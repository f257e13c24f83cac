// Saved tensors that alias a flat: autograd keeps only "which view of which
// parameter, at which version", and the flat is gathered when backward unpacks
// it, pinned until the node that asked for it is done (its code may use raw
// pointers). So backward gathers exactly the flats whose values it needs. Of a
// parameter's cast to another dtype it keeps no more
// (sharding/dispatch/saved_casts.h).
//
// Reached through libtorch's default saved-variable hooks, which a subclass of
// autograd's Engine gives out. With hooks libtorch does not check versions, so
// these do, with libtorch's own message.
#ifndef SHARDING_DISPATCH_SAVED_TENSORS_H_
#define SHARDING_DISPATCH_SAVED_TENSORS_H_

#include <cstdint>

namespace tessera {

// Installs the hooks for the whole process. Idempotent; LOCAL. They cost about
// 0.3 us per saved tensor while any engine lives, nothing otherwise.
void InstallSavedTensorHooks();

// Releases the pins that unpacked tensors hold, on all threads, and all
// BackwardPins. Call when no backward runs.
void ReleaseNodePins();

// Backward of ours about to run on this thread: the first graph task that
// starts is the outermost one. Its id is -1 until then and after Disarm.
class OutermostTask {
 public:
  OutermostTask();
  ~OutermostTask();
  // Id of the outermost graph task of the running Backward; -1 if none runs.
  static int64_t id();
};

}  // namespace tessera
#endif  // SHARDING_DISPATCH_SAVED_TENSORS_H_
