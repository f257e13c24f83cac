// MemoryLedger counts how many bytes are held for which purpose: one ledger for
// the host's memory, and one for each device's.
//
//   AllocateCounted --> host    Add/Remove   [ parameters | gradients | ... ]
//   device buffers  --> cuda:0  TryAdd/...   [ the same ]        limit
//
// A ledger knows what it is given: the memory that grows with the model, and
// not what libtorch allocates for activations. It counts the bytes asked for,
// not pages or blocks.
//
// A limit belongs to one ledger: what a device holds does not limit host
// buffers, nor the other way round. It bounds what TryAdd lets all kinds
// together hold in the whole process; engines of one process share it.
//
// Threads: any.
#ifndef BASE_MEMORY_LEDGER_H_
#define BASE_MEMORY_LEDGER_H_

#include <array>
#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"

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

// MemoryReport is what the ledger held at one moment. The total's peak is the
// peak of the sum, not the sum of the peaks. While other threads allocate, the
// figures may be of slightly different instants.
struct MemoryReport {
  std::array<MemoryUse, kNumMemoryKinds> by_kind;
  MemoryUse total;
  // Host memory that is freed but still with the process; no other field counts
  // it.
  int64_t kept_bytes = 0;

  const MemoryUse& operator[](MemoryKind kind) const {
    return by_kind[static_cast<int>(kind)];
  }
  // Returns "parameters 1048576 (peak 2097152), ..., total ...", in bytes;
  // kinds that were never used are left out, and so is kept_bytes.
  std::string ToString() const;
};

class MemoryLimit;

// The ledger holds the bytes of this process for each kind. LOCAL.
class MemoryLedger {
 public:
  // Returns the ledger of host memory.
  static MemoryLedger& Host();
  // Returns the ledger of a device's memory, by libtorch's name for the device
  // ("cuda:0"); "cpu" is the host. The ledger lives to the end of the process.
  static MemoryLedger& Of(absl::string_view device);

  // Makes a ledger that no device has, for tests.
  MemoryLedger() : MemoryLedger("cpu", /*watched=*/false) {}
  MemoryLedger(const MemoryLedger&) = delete;
  MemoryLedger& operator=(const MemoryLedger&) = delete;

  const std::string& device() const { return device_; }
  bool of_host() const { return this == &Host(); }

  // Counts memory that exists already; never refused.
  void Add(MemoryKind kind, int64_t bytes);
  // Counts `bytes` and returns true, or changes nothing and returns false if
  // the limit would be exceeded. 0 bytes never exceed it.
  bool TryAdd(MemoryKind kind, int64_t bytes);
  // REQUIRES: that many bytes of this kind were added.
  void Remove(MemoryKind kind, int64_t bytes);

  // Calls TryAdd for `what` ("gradients"). Returns the error of Refused on
  // failure.
  absl::Status Claim(MemoryKind kind, int64_t bytes, absl::string_view what);
  // Returns ResourceExhausted: "cannot allocate BYTES bytes for WHAT: WHY; held
  // now: ...". Notifies the watch (ledger_watch.h).
  absl::Status Refused(int64_t bytes, absl::string_view what,
                       absl::string_view why) const;

  MemoryReport Report() const;
  MemoryUse total() const;
  // Lowers all peaks to the current figures.
  void ResetPeak();

  // limit_bytes() is the most that TryAdd lets all kinds together hold: the
  // least of SetLimit's value, kNoLimit at first, and all MemoryLimits.
  static constexpr int64_t kNoLimit = INT64_MAX;
  void SetLimit(int64_t bytes);
  int64_t limit_bytes() const { return limit_bytes_; }
  // Returns the least of the MemoryLimits alone, lifted or not; kNoLimit
  // without any.
  int64_t least_memory_limit() const;

 private:
  friend class MemoryLimit;
  friend class NoMemoryLimit;
  struct Counter {
    std::atomic<int64_t> current{0};
    std::atomic<int64_t> peak{0};
  };
  MemoryLedger(absl::string_view device, bool watched);
  static void Raise(Counter& counter, int64_t current_bytes);
  void AddToKind(MemoryKind kind, int64_t bytes);
  void TellWatch(int64_t change) const;
  int64_t LeastMemoryLimit() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(limits_mutex_);
  // Recomputes limit_bytes_ after any change of the limits.
  void FindLimit() ABSL_EXCLUSIVE_LOCKS_REQUIRED(limits_mutex_);
  void ChangeLimits(const MemoryLimit* added, const MemoryLimit* gone);
  void ChangeUnlimited(int change);
  std::string LimitText() const;

  const std::string device_;
  const bool watched_;
  std::array<Counter, kNumMemoryKinds> by_kind_;
  Counter total_;
  std::atomic<int64_t> limit_bytes_{kNoLimit};

  mutable absl::Mutex limits_mutex_;
  int64_t set_limit_ ABSL_GUARDED_BY(limits_mutex_) = kNoLimit;
  int unlimited_ ABSL_GUARDED_BY(limits_mutex_) = 0;
  std::vector<const MemoryLimit*> limits_ ABSL_GUARDED_BY(limits_mutex_);
};

// Limits `ledger` for as long as this lives.
class MemoryLimit {
 public:
  // `from` is for messages: who set the limit, and what to do where it refuses.
  // The ledger outlives this.
  MemoryLimit(MemoryLedger* ledger, int64_t bytes, std::string from);
  ~MemoryLimit();
  MemoryLimit(const MemoryLimit&) = delete;
  MemoryLimit& operator=(const MemoryLimit&) = delete;

  int64_t bytes() const { return bytes_; }
  const std::string& from() const { return from_; }

 private:
  MemoryLedger* const ledger_;
  const int64_t bytes_;
  const std::string from_;
};

// Lifts all limits of `ledger` while this lives, for memory that is given back
// to others.
class NoMemoryLimit {
 public:
  explicit NoMemoryLimit(MemoryLedger* ledger);
  ~NoMemoryLimit();
  NoMemoryLimit(const NoMemoryLimit&) = delete;
  NoMemoryLimit& operator=(const NoMemoryLimit&) = delete;

 private:
  MemoryLedger* const ledger_;
};

}  // namespace tessera
#endif  // BASE_MEMORY_LEDGER_H_
