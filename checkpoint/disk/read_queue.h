// ReadQueue: reads that the kernel does while this thread does something else,
// by io_uring. No torch.
//
// Threads: one.
#ifndef CHECKPOINT_DISK_READ_QUEUE_H_
#define CHECKPOINT_DISK_READ_QUEUE_H_

#include <cstddef>
#include <cstdint>
#include <memory>

namespace tessera {

class ReadQueue {
 public:
  struct Done {
    size_t tag = 0;      // of Begin
    int64_t result = 0;  // as FileSystem::Read's
  };

  // Of `depth` reads at once, a power of two. Null: this kernel has no
  // io_uring, or forbids it. LOCAL.
  static std::unique_ptr<ReadQueue> Create(unsigned depth);
  // Waits for all that have begun.
  ~ReadQueue();

  bool empty() const { return pending_ == 0; }
  // REQUIRES: fewer than `depth` have begun and not been returned. `fd` and
  // `to` outlive it.
  void Begin(size_t tag, int fd, char* to, int64_t bytes, int64_t offset);
  // Next would not wait.
  bool Ready();
  // The next that is done, in any order. REQUIRES: not empty. Blocking.
  Done Next();

 private:
  struct Ring;
  explicit ReadQueue(std::unique_ptr<Ring> ring);
  std::unique_ptr<Ring> ring_;
  size_t pending_ = 0;
};

}  // namespace tessera
#endif  // CHECKPOINT_DISK_READ_QUEUE_H_
