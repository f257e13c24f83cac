#include "offload/pinned_buffer.h"

#include <algorithm>
#include <iterator>
#include <list>
#include <map>
#include <utility>

#include "ATen/ops/empty.h"
#include "absl/base/thread_annotations.h"
#include "absl/numeric/bits.h"
#include "absl/synchronization/mutex.h"
#include "base/check.h"
#include "base/memory/ledger.h"
#include "base/status.h"
#include "base/torch_guard.h"
#include "offload/pinned_settings.h"

namespace tessera {
namespace {

constexpr int64_t kAlignment = 4096;
constexpr int64_t kLeastChunk = int64_t{1} << 20;
constexpr int64_t kMostGrowth = int64_t{1} << 30;

// What a buffer of so many bytes takes of a chunk.
int64_t Rounded(int64_t bytes) {
  return std::max((bytes + kAlignment - 1) / kAlignment, int64_t{1}) *
         kAlignment;
}

class PinnedChunks {
 public:
  static PinnedChunks& Global() {
    static auto* const chunks = new PinnedChunks();
    return *chunks;
  }
  struct Place {
    at::Tensor chunk;  // [bytes]
    int64_t begin = 0;
    std::vector<StreamPoint> after;
  };

  // Throws c10::Error.
  Place Take(int64_t bytes) {
    absl::MutexLock lock(&mutex_);
    Chunk* best = nullptr;
    Free::iterator found;
    for (Chunk& chunk : chunks_) {
      for (auto it = chunk.free.begin(); it != chunk.free.end(); ++it) {
        if (it->second.bytes < bytes) continue;
        if (best == nullptr || it->second.bytes < found->second.bytes) {
          best = &chunk;
          found = it;
        }
      }
    }
    if (best == nullptr) {
      best = Add(bytes);
      found = best->free.begin();
    }
    Place place = {best->memory, found->first, found->second.after};
    Range rest = std::move(found->second);
    best->free.erase(found);
    rest.bytes -= bytes;
    if (rest.bytes > 0) {
      best->free.emplace(place.begin + bytes, std::move(rest));
    }
    best->used += bytes;
    return place;
  }

  void Give(const at::Tensor& of_chunk, int64_t begin, int64_t bytes,
            std::vector<StreamPoint> after) {
    absl::MutexLock lock(&mutex_);
    const auto chunk =
        std::find_if(chunks_.begin(), chunks_.end(), [&](const Chunk& each) {
          return each.memory.storage().is_alias_of(of_chunk.storage());
        });
    TESSERA_CHECK(chunk != chunks_.end());
    chunk->used -= bytes;
    if (chunk->used == 0) {  // libtorch keeps it until no device uses it
      bytes_ -= chunk->memory.numel();
      chunks_.erase(chunk);
      return;
    }
    auto it = chunk->free.emplace(begin, Range{bytes, std::move(after)}).first;
    const auto join = [&](Free::iterator first) {
      const auto second = std::next(first);
      if (second == chunk->free.end() ||
          first->first + first->second.bytes != second->first) {
        return;
      }
      first->second.bytes += second->second.bytes;
      std::move(second->second.after.begin(), second->second.after.end(),
                std::back_inserter(first->second.after));
      chunk->free.erase(second);
    };
    join(it);
    if (it != chunk->free.begin()) join(std::prev(it));
  }

  int64_t bytes() const {
    absl::MutexLock lock(&mutex_);
    return bytes_;
  }

 private:
  struct Range {
    int64_t bytes = 0;
    std::vector<StreamPoint> after;  // who had it may use it until then
  };
  using Free = std::map<int64_t, Range>;  // by begin
  struct Chunk {
    at::Tensor memory;
    Free free;
    int64_t used = 0;
  };

  Chunk* Add(int64_t bytes) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    const auto up = [](int64_t n) {
      return static_cast<int64_t>(absl::bit_ceil(static_cast<uint64_t>(n)));
    };
    const int64_t growth =
        std::clamp(up(bytes_ / 4 + 1), kLeastChunk, kMostGrowth);
    const int64_t size = std::max(up(bytes), growth);
    [[maybe_unused]] static const bool set = (SetPinnedSettings(), true);
    Chunk chunk;
    chunk.memory = at::empty(
        {size},
        at::TensorOptions(at::kByte).device(at::kCPU).pinned_memory(true));
    chunk.free.emplace(0, Range{size, {}});
    bytes_ += size;
    chunks_.push_back(std::move(chunk));
    return &chunks_.back();
  }

  mutable absl::Mutex mutex_;
  std::list<Chunk> chunks_ ABSL_GUARDED_BY(mutex_);
  int64_t bytes_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace

int64_t PinnedChunkBytes() { return PinnedChunks::Global().bytes(); }

absl::StatusOr<PinnedBuffer> PinnedBuffer::Allocate(int64_t numel,
                                                    at::ScalarType dtype,
                                                    MemoryKind kind) {
  const auto item = static_cast<int64_t>(c10::elementSize(dtype));
  const int64_t bytes = numel * item;
  TESSERA_RETURN_IF_ERROR(
      MemoryLedger::Host().Claim(kind, bytes, MemoryKindName(kind)));
  PinnedBuffer buffer;
  buffer.kind_ = kind;
  const absl::Status made = CatchTorch("allocate pinned memory", [&] {
    const PinnedChunks::Place place =
        PinnedChunks::Global().Take(Rounded(bytes));
    buffer.tensor_ = place.chunk.narrow(0, place.begin, bytes).view(dtype);
    for (const StreamPoint& each : place.after) each.Wait();
    buffer.tensor_.zero_();
  });
  if (made.ok()) return buffer;
  if (!buffer.defined()) MemoryLedger::Host().Remove(kind, bytes);
  // A driver's own words for it are no kind of error of libtorch's.
  return MemoryLedger::Host().Refused(bytes, MemoryKindName(kind),
                                      made.message());
}

PinnedBuffer& PinnedBuffer::operator=(PinnedBuffer&& other) noexcept {
  if (this == &other) return *this;
  Reset();
  kind_ = other.kind_;
  tensor_ = std::move(other.tensor_);
  return *this;
}

void PinnedBuffer::Reset(std::vector<StreamPoint> uses) {
  if (!defined()) return;
  const at::Tensor view = std::exchange(tensor_, at::Tensor());
  const auto bytes = static_cast<int64_t>(view.nbytes());
  MemoryLedger::Host().Remove(kind_, bytes);
  PinnedChunks::Global().Give(
      view, view.storage_offset() * static_cast<int64_t>(view.element_size()),
      Rounded(bytes), std::move(uses));
}

}  // namespace tessera
