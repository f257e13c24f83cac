#include "base/disk/disk_ring.h"

#include <errno.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <utility>

#include "base/check.h"

namespace tessera {
namespace {

constexpr unsigned kMostRegistered = 1024;                  // ranges
constexpr int64_t kMostRegisteredBytes = int64_t{1} << 30;  // of a range: Linux

bool KnowsReads(io_uring* ring) {
  io_uring_probe* const probe = io_uring_get_probe_ring(ring);
  if (probe == nullptr) return false;
  const bool knows = io_uring_opcode_supported(probe, IORING_OP_READ) != 0 &&
                     io_uring_opcode_supported(probe, IORING_OP_WRITE) != 0;
  io_uring_free_probe(probe);
  return knows;
}

bool IsPassing(int result) {
  return result == -EINTR || result == -EAGAIN || result == -EBUSY;
}

}  // namespace

std::unique_ptr<DiskRing> DiskRing::Create(unsigned depth) {
  std::unique_ptr<DiskRing> ring(new DiskRing);
  return ring->Start(depth) ? std::move(ring) : nullptr;
}

DiskRing::~DiskRing() {
  while (!empty()) Next();
  if (has_ring_) io_uring_queue_exit(&ring_);
  if (wake_fd_ >= 0) close(wake_fd_);
}

bool DiskRing::Start(unsigned depth) {
  wake_fd_ = eventfd(0, EFD_CLOEXEC);
  // One more entry for what wakes it.
  has_ring_ = wake_fd_ >= 0 && io_uring_queue_init(depth + 1, &ring_, 0) == 0;
  if (!has_ring_ || !KnowsReads(&ring_)) return false;
  if (io_uring_register_buffers_sparse(&ring_, kMostRegistered) == 0) {
    absl::MutexLock lock(&mutex_);
    for (int i = kMostRegistered; i-- > 0;) free_buffers_.push_back(i);
  }
  return true;
}

io_uring_sqe* DiskRing::NextEntry() {
  io_uring_sqe* const entry = io_uring_get_sqe(&ring_);
  TESSERA_CHECK(entry != nullptr) << "more requests at once than the ring has";
  return entry;
}

void DiskRing::Begin(size_t tag, const Request& r) {
  io_uring_sqe* const entry = NextEntry();
  const auto bytes = static_cast<unsigned>(r.bytes);
  const auto offset = static_cast<uint64_t>(r.offset);
  if (r.buffer >= 0 && r.write) {
    io_uring_prep_write_fixed(entry, r.fd, r.memory, bytes, offset, r.buffer);
  } else if (r.buffer >= 0) {
    io_uring_prep_read_fixed(entry, r.fd, r.memory, bytes, offset, r.buffer);
  } else if (r.write) {
    io_uring_prep_write(entry, r.fd, r.memory, bytes, offset);
  } else {
    io_uring_prep_read(entry, r.fd, r.memory, bytes, offset);
  }
  io_uring_sqe_set_data64(entry, tag);
  ++pending_;
}

DiskRing::Done DiskRing::Next() {
  io_uring_cqe* entry = nullptr;
  bool submits = io_uring_sq_ready(&ring_) > 0;
  while (std::exchange(submits, false) ||
         io_uring_peek_cqe(&ring_, &entry) != 0) {
    const int result = io_uring_submit_and_wait(&ring_, 1);
    TESSERA_CHECK(result >= 0 || IsPassing(result)) << "io_uring: " << result;
  }
  const Done done = {static_cast<size_t>(entry->user_data), entry->res};
  io_uring_cqe_seen(&ring_, entry);
  if (done.tag == kWoken) {
    TESSERA_CHECK(done.result == sizeof(wakes_) || done.result == -EINTR ||
                  done.result == -EAGAIN)
        << "io_uring: " << done.result;
  } else {
    --pending_;
  }
  return done;
}

void DiskRing::Listen() {
  io_uring_sqe* const entry = NextEntry();
  io_uring_prep_read(entry, wake_fd_, &wakes_, sizeof(wakes_), 0);
  io_uring_sqe_set_data64(entry, kWoken);
}

void DiskRing::Wake() {
  const int error = eventfd_write(wake_fd_, 1);
  TESSERA_CHECK(error == 0) << "eventfd: " << errno;
}

bool DiskRing::Register(char* memory, int64_t bytes) {
  if (bytes <= 0 || bytes > kMostRegisteredBytes) return false;
  int index = 0;
  {
    absl::MutexLock lock(&mutex_);
    if (free_buffers_.empty() || ranges_.count(memory) > 0) return false;
    index = free_buffers_.back();
    free_buffers_.pop_back();
  }
  // Requests go on while the kernel maps it.
  const bool done = UpdateBuffer(index, {memory, static_cast<size_t>(bytes)});
  absl::MutexLock lock(&mutex_);
  if (done) {
    ranges_[memory] = {bytes, index};
  } else {
    free_buffers_.push_back(index);
  }
  return done;
}

void DiskRing::Unregister(char* memory) {
  absl::MutexLock lock(&mutex_);
  const auto it = ranges_.find(memory);
  if (it == ranges_.end()) return;
  const int index = it->second.index;
  ranges_.erase(it);
  // Where it is refused the entry is not used again.
  if (UpdateBuffer(index, {})) free_buffers_.push_back(index);
}

bool DiskRing::HasRegistered() const {
  absl::MutexLock lock(&mutex_);
  return !ranges_.empty();
}

int DiskRing::BufferOf(const char* memory, int64_t bytes) const {
  absl::MutexLock lock(&mutex_);
  auto it = ranges_.upper_bound(memory);
  if (it == ranges_.begin()) return -1;
  --it;
  return memory + bytes <= it->first + it->second.bytes ? it->second.index : -1;
}

bool DiskRing::UpdateBuffer(int index, const iovec& range) {
  const __u64 no_tag = 0;
  return io_uring_register_buffers_update_tag(
             &ring_, static_cast<unsigned>(index), &range, &no_tag, 1) == 1;
}

}  // namespace tessera
