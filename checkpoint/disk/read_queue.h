// ReadQueue lets the kernel read while this thread does something else, by
// io_uring. No torch.
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
    size_t tag = 0;      // that of Begin
    int64_t result = 0;  // what FileSystem::Read would return
  };

  // Makes a queue of `depth` concurrent reads, a power of two. Returns null if
  // this kernel has no io_uring or forbids it. LOCAL.
  static std::unique_ptr<ReadQueue> Create(unsigned depth);
  // Waits for all reads that have begun.
  ~ReadQueue();

  bool empty() const { return pending_ == 0; }
  // Begins a read. REQUIRES: fewer than `depth` reads have begun and not been
  // returned; `fd` and `to` outlive the read.
  void Begin(size_t tag, int fd, char* to, int64_t bytes, int64_t offset);
  // Returns whether Next would return without waiting.
  bool Ready();
  // Returns the next read that is done, in any order. REQUIRES: not empty.
  // Blocking.
  Done Next();

 private:
  struct Ring;
  explicit ReadQueue(std::unique_ptr<Ring> ring);
  std::unique_ptr<Ring> ring_;
  size_t pending_ = 0;
};

}  // namespace tessera
#endif  // CHECKPOINT_DISK_READ_QUEUE_H_
