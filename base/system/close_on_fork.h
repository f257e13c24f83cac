// Close-on-fork is for fork what O_CLOEXEC is for exec. A child that is forked
// and goes on without exec (a data loader's worker, a helper that becomes a
// daemon) would hold the sockets and locks by which others judge whether this
// process lives: they would consider it alive as long as the child lives.
//
//   parent   fd 7 -> connection        fd 8 -> lock         fd 9 -> user's file
//   child    fd 7 -> /dev/null         fd 8 -> /dev/null    fd 9 -> user's file
//
// The numbers stay taken, so that a copy of an object that still has one does
// not write into a file that the child opens later.
//
// Threads: all functions may be called from any thread. A fork waits while a
// descriptor is opened or closed here, so that none slips through.
#ifndef BASE_SYSTEM_CLOSE_ON_FORK_H_
#define BASE_SYSTEM_CLOSE_ON_FORK_H_

#include <functional>

namespace tessera {

// Calls `open`, which must not block and returns -1 or a new descriptor, and
// returns its result. A forked child will not have the descriptor. It is never
// 0, 1 or 2, to which other code writes.
int OpenCloseOnFork(const std::function<int()>& open);

// Marks a descriptor that is open already. A fork in another thread may come
// before the mark.
void SetCloseOnFork(int fd);
bool IsCloseOnFork(int fd);

// Makes `to` stand for what `from` does, by dup3; a forked child will not have
// `to`. Returns `to`, or -1 with errno.
int DuplicateCloseOnFork(int from, int to);

// Calls close(), for marked and for any other descriptors.
int CloseDescriptor(int fd);

}  // namespace tessera
#endif  // BASE_SYSTEM_CLOSE_ON_FORK_H_
