// Counted memory is the one place where large host buffers come from. The
// host's ledger (base/memory/ledger.h) counts them.
//
//   AllocateCounted(bytes, kind) --> CountedBuffer --> memory
//                     \  Claim/Remove
//                      MemoryLedger::Host()
//
// A buffer of 128 KiB or more is its own anonymous mapping: fresh pages are
// zero, and a page counts in the resident size only when touched. Huge pages
// are not requested, since one touched byte would then hold 2 MiB. Smaller
// buffers come from the heap.
//
// A freed mapping stays with the process for the next buffer of its size
// (base/memory/kept_buffers.h), as long as what is held and kept together
// exceeds the ledger's peak by at most 1/16 or 4 MiB: so keeping hardly raises
// what the process ever held. EndKeptPeriod gives back what is no longer asked
// for.
//
// A MemorySource may supply the large buffers in place of the system, for
// memory that other processes can map.
//
// The ledger counts the bytes asked for: pages that are not yet touched count,
// rounding to 4 KiB does not.
//
// Threads: AllocateCounted and SetPoisonOnFree are safe from any thread; one
// CountedBuffer needs outside order.
#ifndef BASE_MEMORY_MEMORY_H_
#define BASE_MEMORY_MEMORY_H_

#include <cstdint>

#include "absl/status/statusor.h"
#include "base/memory/ledger.h"

namespace tessera {

// Owns bytes that the host's ledger counts. Moved-from or default-constructed,
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

// Returns a buffer of `bytes`, filled with zeros if `zeroed`, of any content
// otherwise; 0 bytes give an empty buffer. Returns InvalidArgument for a
// negative size and ResourceExhausted, naming the bytes wanted, the kind and
// what is held, if the ledger's limit or the system refuses.
absl::StatusOr<CountedBuffer> AllocateCounted(int64_t bytes, MemoryKind kind,
                                              bool zeroed = false);

// Supplies the buffers of kMappedFromBytes or more.
class MemorySource {
 public:
  virtual ~MemorySource() = default;
  // Returns zeros, aligned to a page; null if there is no room.
  virtual void* Allocate(int64_t bytes) = 0;
  // Takes what Allocate gave, and its size. The pages go back to the system.
  virtual void Free(void* data, int64_t bytes) = 0;
  virtual bool Owns(const void* data) const = 0;
  // Returns the bytes of the pages that the source holds now.
  virtual int64_t resident_bytes() const = 0;
};
// Sets the source of all later buffers. At most once in a process; `source`
// lives to its end.
void SetMemorySource(MemorySource* source);

// Ends a step: what was freed some steps ago and not asked for since goes back
// to the system.
void EndKeptPeriod();
// Gives everything that is kept back to the system.
void ReturnKept();
// Returns the bytes that are freed but still with the process.
int64_t KeptBytes();

// While on, every buffer is filled with 0xFF bytes (NaN, as floating point)
// before it is freed, so that tests see reads through stale pointers. Off at
// first.
void SetPoisonOnFree(bool poison);
bool PoisonsOnFree();

// ResidentMemory is what the kernel says about this process
// (/proc/self/smaps_rollup), in bytes.
struct ResidentMemory {
  int64_t rss_bytes = 0;  // every resident page, shared ones in full
  int64_t pss_bytes = 0;  // shared pages divided by their number of users
  // Pages of the heap, stacks, private mappings and the MemorySource, but not
  // of files.
  int64_t anonymous_bytes = 0;
  int64_t private_dirty_bytes = 0;  // written, and by this process alone
};
// Reads it in about a millisecond per GiB held. Returns Unavailable where the
// kernel has no such file.
absl::StatusOr<ResidentMemory> ReadResidentMemory();

// Returns the PSS: summed over the ranks of a host it is the memory of the
// host, with libraries and shared buffers counted once. To compare with the
// ledger use anonymous_bytes, which leaves libraries out altogether.
absl::StatusOr<int64_t> ResidentBytes();

}  // namespace tessera
#endif  // BASE_MEMORY_MEMORY_H_
