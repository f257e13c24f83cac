#include "base/memory/memory.h"

#include <errno.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/check.h"
#include "base/file.h"
#include "base/memory/kept_buffers.h"
#include "base/status.h"

namespace tessera {
namespace {

std::atomic<bool> g_poison_on_free{false};

std::atomic<MemorySource*> g_source{nullptr};

int64_t RoundUp(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

// Under AddressSanitizer nothing is kept, so that it sees stale reads.
#if __has_feature(address_sanitizer)
constexpr bool kKeep = false;
#else
constexpr bool kKeep = true;
#endif

constexpr int64_t kKeepSlackBytes = 4 << 20;

KeptBuffers& Kept() {
  static KeptBuffers* const kept = new KeptBuffers;
  return *kept;
}

// Returns how much may be kept besides what is held now. Without the slack,
// buffers of other sizes that were not held at the moment of the peak would
// push out what the next step takes again.
int64_t RoomToKeep() {
  const MemoryUse total = MemoryLedger::Host().total();
  const int64_t most =
      total.peak_bytes + std::max(total.peak_bytes / 16, kKeepSlackBytes);
  return kKeep ? std::max<int64_t>(0, most - total.current_bytes) : 0;
}

bool FromSource(const void* data) {
  MemorySource* const source = g_source.load();
  return source != nullptr && source->Owns(data);
}

// Holds mappings without pages that the kernel does not take back: adjacent
// mappings are one to it, and where a process has its maximum of mappings
// (vm.max_map_count) none can be cut in two. They are zeros, for later buffers
// of their size.
KeptBuffers& Stuck() {
  static KeptBuffers* const stuck = new KeptBuffers;
  return *stuck;
}

void Unmap(const std::vector<KeptBuffers::Buffer>& buffers) {
  for (const auto& [data, bytes] : buffers) {
    if (FromSource(data)) {
      g_source.load()->Free(data, bytes);
      continue;
    }
    const auto length = static_cast<size_t>(bytes);
    if (munmap(data, length) == 0) continue;
    TESSERA_CHECK_EQ(errno, ENOMEM);
    TESSERA_CHECK_EQ(madvise(data, length, MADV_DONTNEED), 0);
    (void)Stuck().Keep({data, bytes}, INT64_MAX);
  }
}

// Returns whether no collective ever reads or writes the kind: its pages cost
// the kernel half of those that other processes can map.
bool IsPrivate(MemoryKind kind) { return kind == MemoryKind::kOptimizer; }

// Returns zeros; null on failure.
void* Map(int64_t bytes, MemoryKind kind) {
  MemorySource* const source = g_source.load();
  if (source != nullptr && !IsPrivate(kind)) {
    errno = ENOMEM;
    return source->Allocate(bytes);
  }
  // Fresh anonymous pages are zero already.
  if (void* const stuck = Stuck().Take(bytes)) return stuck;
  void* mapped =
      mmap(nullptr, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE,
           MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  return mapped == MAP_FAILED ? nullptr : mapped;
}

// Returns null on failure. `bytes` > 0, in the ledger already.
void* AllocateRaw(int64_t bytes, MemoryKind kind, bool zeroed) {
  if (bytes < kMappedFromBytes) {
    void* data =
        std::aligned_alloc(kBufferAlignment, RoundUp(bytes, kBufferAlignment));
    if (data != nullptr && zeroed) std::memset(data, 0, bytes);
    return data;
  }
  const bool takes_kept = g_source.load() == nullptr || !IsPrivate(kind);
  if (void* data = takes_kept ? Kept().Take(bytes) : nullptr) {
    if (zeroed) std::memset(data, 0, bytes);
    return data;
  }
  Unmap(Kept().Shrink(RoomToKeep()));
  void* data = Map(bytes, kind);
  if (data != nullptr) return data;
  ReturnKept();
  return Map(bytes, kind);
}

// Frees memory that is no longer in the ledger.
void FreeRaw(void* data, int64_t bytes) {
  if (g_poison_on_free.load(std::memory_order_relaxed)) {
    std::memset(data, 0xFF, bytes);
  }
  if (bytes < kMappedFromBytes) {
    std::free(data);
  } else if (g_source.load() != nullptr && !FromSource(data)) {
    Unmap({{data, bytes}});  // private, or from before the source was set
  } else {
    Unmap(Kept().Keep({data, bytes}, RoomToKeep()));
  }
}

}  // namespace

CountedBuffer::CountedBuffer(CountedBuffer&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)),
      bytes_(std::exchange(other.bytes_, 0)),
      kind_(other.kind_) {}

CountedBuffer& CountedBuffer::operator=(CountedBuffer&& other) noexcept {
  if (this == &other) return *this;
  Free();
  data_ = std::exchange(other.data_, nullptr);
  bytes_ = std::exchange(other.bytes_, 0);
  kind_ = other.kind_;
  return *this;
}

void CountedBuffer::Free() {
  if (data_ == nullptr) return;
  MemoryLedger::Host().Remove(kind_, bytes_);
  FreeRaw(data_, bytes_);
  data_ = nullptr;
  bytes_ = 0;
}

absl::StatusOr<CountedBuffer> AllocateCounted(int64_t bytes, MemoryKind kind,
                                              bool zeroed) {
  if (bytes < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("cannot allocate ", bytes, " bytes"));
  }
  if (bytes == 0) return CountedBuffer(nullptr, 0, kind);
  MemoryLedger& ledger = MemoryLedger::Host();
  TESSERA_RETURN_IF_ERROR(ledger.Claim(kind, bytes, MemoryKindName(kind)));
  void* data = AllocateRaw(bytes, kind, zeroed);
  if (data == nullptr) {
    const int error = errno;
    ledger.Remove(kind, bytes);
    return ledger.Refused(bytes, MemoryKindName(kind), std::strerror(error));
  }
  return CountedBuffer(data, bytes, kind);
}

void SetMemorySource(MemorySource* source) {
  MemorySource* none = nullptr;
  TESSERA_CHECK(g_source.compare_exchange_strong(none, source));
  ReturnKept();
}

void EndKeptPeriod() { Unmap(Kept().EndPeriod()); }
void ReturnKept() { Unmap(Kept().Shrink(0)); }
int64_t KeptBytes() { return Kept().bytes(); }

void SetPoisonOnFree(bool poison) { g_poison_on_free = poison; }
bool PoisonsOnFree() { return g_poison_on_free; }

absl::StatusOr<ResidentMemory> ReadResidentMemory() {
  constexpr char kPath[] = "/proc/self/smaps_rollup";
  const absl::StatusOr<std::string> text = ReadWholeFile(kPath);
  if (!text.ok()) return absl::UnavailableError(text.status().message());
  ResidentMemory memory;
  const std::pair<absl::string_view, int64_t*> fields[] = {
      {"Rss:", &memory.rss_bytes},
      {"Pss:", &memory.pss_bytes},
      {"Anonymous:", &memory.anonymous_bytes},
      {"Private_Dirty:", &memory.private_dirty_bytes}};
  for (absl::string_view line : absl::StrSplit(*text, '\n')) {
    // The line is "Rss:                1664 kB".
    const std::vector<absl::string_view> words =
        absl::StrSplit(line, ' ', absl::SkipEmpty());
    int64_t kibibytes = 0;
    if (words.size() != 3 || !absl::SimpleAtoi(words[1], &kibibytes)) continue;
    for (const auto& [name, bytes] : fields) {
      if (words[0] == name) *bytes = kibibytes * 1024;
    }
  }
  if (memory.rss_bytes == 0) {
    return absl::UnavailableError(absl::StrCat(kPath, " has no line Rss:"));
  }
  if (MemorySource* source = g_source.load()) {
    memory.anonymous_bytes += source->resident_bytes();
  }
  return memory;
}

absl::StatusOr<int64_t> ResidentBytes() {
  TESSERA_ASSIGN_OR_RETURN(const ResidentMemory memory, ReadResidentMemory());
  return memory.pss_bytes;
}

}  // namespace tessera
