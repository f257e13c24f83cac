// Saved tensors that alias a flat: autograd keeps only "which view of which
// parameter, at which version", and the flat is gathered when backward unpacks
// it, pinned until the node that asked for it is done (its code may use raw
// pointers). So backward gathers exactly the flats whose values it needs. A
// parameter's cast to another dtype is not kept either
// (sharding/dispatch/saved_casts.h).
//
// This works through libtorch's default saved-variable hooks, which a subclass
// of autograd's Engine provides. With hooks libtorch does not check versions,
// so these hooks do, with libtorch's own message.
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

// As ReleaseNodePins, for nodes on this thread that have ended. LOCAL; may be
// called within a backward.
void ReleaseEndedNodePins();

// OutermostTask: lives while this thread runs an engine's Backward; the first
// graph task that starts is the outermost one. The id is negative until then.
class OutermostTask {
 public:
  OutermostTask();
  ~OutermostTask();
  // Returns the id of the outermost graph task of the running Backward;
  // negative if there is none.
  static int64_t id();
};

}  // namespace tessera
#endif  // SHARDING_DISPATCH_SAVED_TENSORS_H_
