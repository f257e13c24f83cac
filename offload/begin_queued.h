// A hook for tests of early steps (optim/early_steps.h), which Step drops where
// they have not begun: on a busy processor, any number of them.
#ifndef OFFLOAD_BEGIN_QUEUED_H_
#define OFFLOAD_BEGIN_QUEUED_H_

namespace tessera {

// Sets, for all streams, whether UpdateStream::DropQueued first waits until all
// has begun. LOCAL.
void SetBeginsQueued(bool begins);

}  // namespace tessera
#endif  // OFFLOAD_BEGIN_QUEUED_H_
