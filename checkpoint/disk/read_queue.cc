#include "checkpoint/disk/read_queue.h"

#include <errno.h>
#include <liburing.h>

#include <utility>

#include "base/check.h"

namespace tessera {

struct ReadQueue::Ring {
  io_uring ring = {};
  ~Ring() { io_uring_queue_exit(&ring); }
};

ReadQueue::ReadQueue(std::unique_ptr<Ring> ring) : ring_(std::move(ring)) {}

std::unique_ptr<ReadQueue> ReadQueue::Create(unsigned depth) {
  io_uring made = {};
  if (io_uring_queue_init(depth, &made, 0) != 0) return nullptr;
  auto ring = std::make_unique<Ring>();
  ring->ring = made;
  return std::unique_ptr<ReadQueue>(new ReadQueue(std::move(ring)));
}

ReadQueue::~ReadQueue() {
  while (!empty()) Next();
}

void ReadQueue::Begin(size_t tag, int fd, char* to, int64_t bytes,
                      int64_t offset) {
  io_uring_sqe* const entry = io_uring_get_sqe(&ring_->ring);
  TESSERA_CHECK(entry != nullptr) << "more reads at once than the queue has";
  io_uring_prep_read(entry, fd, to, static_cast<unsigned>(bytes),
                     static_cast<uint64_t>(offset));
  io_uring_sqe_set_data64(entry, tag);
  ++pending_;
  // What the kernel does not take now is submitted in Next.
  (void)io_uring_submit(&ring_->ring);
}

bool ReadQueue::Ready() { return io_uring_cq_ready(&ring_->ring) > 0; }

ReadQueue::Done ReadQueue::Next() {
  io_uring_cqe* entry = nullptr;
  while (io_uring_peek_cqe(&ring_->ring, &entry) != 0) {
    const int result = io_uring_submit_and_wait(&ring_->ring, 1);
    TESSERA_CHECK(result >= 0 || result == -EINTR || result == -EAGAIN ||
                  result == -EBUSY)
        << "io_uring: " << result;
  }
  const Done done = {static_cast<size_t>(entry->user_data), entry->res};
  io_uring_cqe_seen(&ring_->ring, entry);
  --pending_;
  return done;
}

}  // namespace tessera
