#include "offload/disk/swap_ring.h"

#include <errno.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "base/check.h"

namespace tessera {
namespace {

constexpr unsigned kMostRegistered = 1024;                  // ranges
constexpr int64_t kMostRegisteredBytes = int64_t{1} << 30;  // of a range: Linux
constexpr uint64_t kWake = ~uint64_t{0};  // the tag that is no slot's

bool KnowsReads(io_uring* ring) {
  io_uring_probe* const probe = io_uring_get_probe_ring(ring);
  if (probe == nullptr) return false;
  const bool knows = io_uring_opcode_supported(probe, IORING_OP_READ) != 0 &&
                     io_uring_opcode_supported(probe, IORING_OP_WRITE) != 0;
  io_uring_free_probe(probe);
  return knows;
}

}  // namespace

std::unique_ptr<SwapRing> SwapRing::Create(const SwapOptions& options,
                                           SwapSystem* system, int fd,
                                           SwapRequests* requests) {
  std::unique_ptr<SwapRing> ring(new SwapRing(options, system, fd, requests));
  if (!ring->Start()) return nullptr;
  return ring;
}

SwapRing::~SwapRing() {
  if (has_ring_) io_uring_queue_exit(&ring_);
  if (wake_fd_ >= 0) close(wake_fd_);
}

bool SwapRing::Start() {
  const int depth = options_.queue_depth;
  wake_fd_ = eventfd(0, EFD_CLOEXEC);
  // One more entry for what wakes it.
  if (wake_fd_ < 0 ||
      io_uring_queue_init(static_cast<unsigned>(depth) + 1, &ring_, 0) != 0) {
    return false;
  }
  has_ring_ = true;
  if (!KnowsReads(&ring_)) return false;
  for (int i = 0; i < depth; ++i) slots_.emplace_back();
  if (io_uring_register_buffers_sparse(&ring_, kMostRegistered) == 0) {
    absl::MutexLock lock(&mutex_);
    for (int i = kMostRegistered; i-- > 0;) free_buffers_.push_back(i);
  }
  return true;
}

void SwapRing::Run() {
  std::vector<size_t> idle;
  for (size_t i = slots_.size(); i-- > 0;) idle.push_back(i);
  bool listening = false, stopping = false;
  for (;;) {
    FillRing(&idle, &stopping);
    if (stopping && idle.size() == slots_.size() && !listening) return;
    if (!stopping && !listening) {
      io_uring_sqe* const entry = io_uring_get_sqe(&ring_);
      TESSERA_CHECK(entry != nullptr);
      io_uring_prep_read(entry, wake_fd_, &wakes_, sizeof(wakes_), 0);
      io_uring_sqe_set_data64(entry, kWake);
      listening = true;
    }
    const int result = io_uring_submit_and_wait(&ring_, 1);
    TESSERA_CHECK(result >= 0 || result == -EINTR || result == -EAGAIN ||
                  result == -EBUSY)
        << "io_uring: " << result;
    io_uring_cqe* done = nullptr;
    while (io_uring_peek_cqe(&ring_, &done) == 0) {
      const uint64_t tag = done->user_data;
      const int answer = done->res;
      io_uring_cqe_seen(&ring_, done);
      if (tag == kWake) {
        TESSERA_CHECK(answer == sizeof(wakes_) || answer == -EINTR ||
                      answer == -EAGAIN)
            << "io_uring: " << answer;
        listening = false;
        continue;
      }
      SwapSlot* const slot = &slots_[tag];
      if (requests_->Landed(
              slot, system_->Completed(slot->request->write,
                                       slot->at + slot->moved, answer))) {
        Submit(tag);
      } else {
        idle.push_back(tag);
      }
    }
  }
}

void SwapRing::Wake() {
  const int error = eventfd_write(wake_fd_, 1);
  TESSERA_CHECK(error == 0) << "eventfd: " << errno;
}

void SwapRing::FillRing(std::vector<size_t>* idle, bool* stopping) {
  *stopping = requests_->stopping();
  if (!options_.overlap_events && idle->size() < slots_.size()) return;
  while (!idle->empty()) {
    SwapSlot* const slot = &slots_[idle->back()];
    if (!requests_->Cut(slot)) return;
    if (slot->memory != nullptr) {
      slot->buffer = BufferOf(slot->memory, slot->bytes);
    }
    if (!requests_->Prepare(slot)) continue;
    Submit(idle->back());
    idle->pop_back();
  }
}

void SwapRing::Submit(size_t index) {
  const SwapSlot& slot = slots_[index];
  // There are as many entries as slots, and one.
  io_uring_sqe* const entry = io_uring_get_sqe(&ring_);
  TESSERA_CHECK(entry != nullptr);
  char* const memory = slot.memory + slot.moved;
  const auto bytes = static_cast<unsigned>(slot.bytes - slot.moved);
  const auto at = static_cast<uint64_t>(slot.at + slot.moved);
  if (slot.buffer >= 0 && slot.request->write) {
    io_uring_prep_write_fixed(entry, fd_, memory, bytes, at, slot.buffer);
  } else if (slot.buffer >= 0) {
    io_uring_prep_read_fixed(entry, fd_, memory, bytes, at, slot.buffer);
  } else if (slot.request->write) {
    io_uring_prep_write(entry, fd_, memory, bytes, at);
  } else {
    io_uring_prep_read(entry, fd_, memory, bytes, at);
  }
  io_uring_sqe_set_data64(entry, index);
  // What the kernel does not take now it takes when it is waited for.
  if (options_.single_submit) (void)io_uring_submit(&ring_);
}

bool SwapRing::Register(void* memory, int64_t bytes) {
  if (!SwapAligned(memory) || bytes <= 0 || bytes > kMostRegisteredBytes) {
    return false;
  }
  auto* const begin = static_cast<const char*>(memory);
  int index = 0;
  {
    absl::MutexLock lock(&mutex_);
    if (free_buffers_.empty() || ranges_.count(begin) > 0) return false;
    index = free_buffers_.back();
    free_buffers_.pop_back();
  }
  // Requests go on while the kernel maps it.
  const bool done = UpdateBuffer(index, {memory, static_cast<size_t>(bytes)});
  absl::MutexLock lock(&mutex_);
  if (done) {
    ranges_[begin] = {bytes, index};
  } else {
    free_buffers_.push_back(index);
  }
  return done;
}

void SwapRing::Unregister(void* memory) {
  absl::MutexLock lock(&mutex_);
  const auto it = ranges_.find(static_cast<const char*>(memory));
  if (it == ranges_.end()) return;
  const int index = it->second.index;
  ranges_.erase(it);
  // Where it is refused the entry is not used again.
  if (UpdateBuffer(index, {})) {
    free_buffers_.push_back(index);
  }
}

bool SwapRing::HasRegistered() const {
  absl::MutexLock lock(&mutex_);
  return !ranges_.empty();
}

int SwapRing::BufferOf(const char* memory, int64_t bytes) const {
  absl::MutexLock lock(&mutex_);
  auto it = ranges_.upper_bound(memory);
  if (it == ranges_.begin()) return -1;
  --it;
  return memory + bytes <= it->first + it->second.bytes ? it->second.index : -1;
}

bool SwapRing::UpdateBuffer(int index, const iovec& range) {
  const __u64 no_tag = 0;
  return io_uring_register_buffers_update_tag(
             &ring_, static_cast<unsigned>(index), &range, &no_tag, 1) == 1;
}

}  // namespace tessera
