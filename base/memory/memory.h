// Counted memory: the one place where large host buffers come from, and the
// ledger that says how many bytes are held for what.
//
//   AllocateCounted(bytes, kind) --> CountedBuffer --> memory
//                     \  Add/Remove
//                      MemoryLedger <-- device allocators: Add/Remove
//
// From 128 KiB on a buffer is its own anonymous mapping: fresh pages are zero,
// and a page counts in the resident size only when touched. Huge pages are not
// asked for, since one touched byte would then hold 2 MiB. Smaller buffers come
// from the heap.
//
// A mapping that is freed stays with the process for the next buffer of its
// size (base/memory/kept_buffers.h), as long as what is held and kept together
// is at most 1/16 or 4 MiB above the ledger's peak: keeping hardly raises what
// the process ever held. EndKeptPeriod gives back what is no longer asked for.
//
// A MemorySource may give the large buffers instead of the system, for memory
// that other processes can map.
//
// The ledger counts the bytes asked for, not pages: pages not yet touched are
// in it and rounding to 4 KiB is not.
//
// Threads: AllocateCounted, MemoryLedger and SetPoisonOnFree are safe from any
// thread; one CountedBuffer needs outside order.
#ifndef BASE_MEMORY_MEMORY_H_
#define BASE_MEMORY_MEMORY_H_

#include <array>
#include <atomic>
#include <cstdint>
#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace tessera {

enum class MemoryKind {
  kParameters,     // shards, and whole parameters where they are not sharded
  kGradients,      // accumulated gradients
  kOptimizer,      // master weights and moments
  kWorking,        // gathered copies
  kCommunication,  // staging of collectives
  kOther,
};
inline constexpr int kNumMemoryKinds = 6;

// "parameters", "gradients", ...
absl::string_view MemoryKindName(MemoryKind kind);

struct MemoryUse {
  int64_t current_bytes = 0;
  int64_t peak_bytes = 0;
};

// What the ledger held at one moment. The total's peak is the peak of the sum,
// not the sum of the peaks. While other threads allocate, the figures may be of
// slightly different instants.
struct MemoryReport {
  std::array<MemoryUse, kNumMemoryKinds> by_kind;
  MemoryUse total;
  // Freed, and still with the process; in none of the others.
  int64_t kept_bytes = 0;

  const MemoryUse& operator[](MemoryKind kind) const {
    return by_kind[static_cast<int>(kind)];
  }
  // "parameters 1048576 (peak 2097152), ..., total ...", in bytes; kinds that
  // were never used are left out, and kept_bytes.
  std::string ToString() const;
};

// The bytes held by this process for each kind. LOCAL.
class MemoryLedger {
 public:
  static MemoryLedger& Global();

  MemoryLedger() = default;
  MemoryLedger(const MemoryLedger&) = delete;
  MemoryLedger& operator=(const MemoryLedger&) = delete;

  // Counts memory that exists already; never refused.
  void Add(MemoryKind kind, int64_t bytes);
  // Counts `bytes` unless the limit would be exceeded; then changes nothing.
  bool TryAdd(MemoryKind kind, int64_t bytes);
  // REQUIRES: that many bytes of this kind were added.
  void Remove(MemoryKind kind, int64_t bytes);

  MemoryReport Report() const;
  MemoryUse total() const;
  // Lowers all peaks to the current figures.
  void ResetPeak();

  // The most that TryAdd lets all kinds together hold; kNoLimit at first.
  static constexpr int64_t kNoLimit = INT64_MAX;
  void SetLimit(int64_t bytes);
  int64_t limit_bytes() const;

 private:
  struct Counter {
    std::atomic<int64_t> current{0};
    std::atomic<int64_t> peak{0};
  };
  static void Raise(Counter& counter, int64_t current_bytes);
  void AddToKind(MemoryKind kind, int64_t bytes);

  std::array<Counter, kNumMemoryKinds> by_kind_;
  Counter total_;
  std::atomic<int64_t> limit_bytes_{kNoLimit};
};

// Owns bytes that the global ledger counts. Moved-from or default-constructed
// it is empty.
class CountedBuffer {
 public:
  CountedBuffer() = default;
  CountedBuffer(CountedBuffer&& other) noexcept;
  CountedBuffer& operator=(CountedBuffer&& other) noexcept;
  ~CountedBuffer() { Free(); }

  // nullptr if empty, otherwise aligned to kBufferAlignment.
  void* data() const { return data_; }
  template <typename T>
  T* data_as() const {
    return static_cast<T*>(data_);
  }
  int64_t bytes() const { return bytes_; }
  MemoryKind kind() const { return kind_; }

  // Frees now; the buffer is empty afterwards.
  void Free();

 private:
  friend absl::StatusOr<CountedBuffer> AllocateCounted(int64_t bytes,
                                                       MemoryKind kind,
                                                       bool zeroed);
  CountedBuffer(void* data, int64_t bytes, MemoryKind kind)
      : data_(data), bytes_(bytes), kind_(kind) {}

  void* data_ = nullptr;
  int64_t bytes_ = 0;
  MemoryKind kind_ = MemoryKind::kOther;
};

inline constexpr int64_t kBufferAlignment = 256;  // bytes
inline constexpr int64_t kMappedFromBytes = 128
                                            << 10;  // smaller: from the heap

// A buffer of `bytes`, filled with zeros if `zeroed`, of any content otherwise.
// 0 bytes give an empty buffer. Returns InvalidArgument for a negative size and
// ResourceExhausted, naming the bytes wanted, the kind and what is held, if the
// ledger's limit or the system refuses.
absl::StatusOr<CountedBuffer> AllocateCounted(int64_t bytes, MemoryKind kind,
                                              bool zeroed = false);

// Where buffers from kMappedFromBytes on come from.
class MemorySource {
 public:
  virtual ~MemorySource() = default;
  // Zeros, aligned to a page; null if there is no room.
  virtual void* Allocate(int64_t bytes) = 0;
  // What Allocate gave, and its size. The pages go back to the system.
  virtual void Free(void* data, int64_t bytes) = 0;
  virtual bool Owns(const void* data) const = 0;
  // Pages held for it now, in bytes.
  virtual int64_t resident_bytes() const = 0;
};
// For all buffers to come. At most once in a process; lives to its end.
void SetMemorySource(MemorySource* source);

// A step ends: what was freed some steps ago and not asked for since goes back
// to the system.
void EndKeptPeriod();
// Everything that is kept goes back to the system.
void ReturnKept();

// On: every buffer is filled with 0xFF bytes (NaN, as floating point) before it
// is freed, so that tests see reads through stale pointers. Off at first.
void SetPoisonOnFree(bool poison);
bool PoisonsOnFree();

// What the kernel says about this process (/proc/self/smaps_rollup), in bytes.
struct ResidentMemory {
  int64_t rss_bytes = 0;  // every resident page, shared ones in full
  int64_t pss_bytes = 0;  // shared pages divided by their number of users
  // Heap, stacks, private mappings, and the MemorySource's: no files.
  int64_t anonymous_bytes = 0;
  int64_t private_dirty_bytes = 0;  // written, and by this process alone
};
// Takes about a millisecond per GiB held. Returns Unavailable where the kernel
// has no such file.
absl::StatusOr<ResidentMemory> ReadResidentMemory();

// PSS: summed over the ranks of a host it is the memory of the host, with
// libraries and shared buffers counted once. To compare with the ledger take
// anonymous_bytes, which leaves libraries out altogether.
absl::StatusOr<int64_t> ResidentBytes();

}  // namespace tessera
#endif  // BASE_MEMORY_MEMORY_H_
