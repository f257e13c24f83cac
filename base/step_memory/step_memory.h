// StepMemory records what this process holds of the host's memory while it
// trains, the peak of each step, and on request all of a step over time. Where
// engines train on devices it also decides when to look at what is held there
// (device_memory.h).
//
//   ledger (base/memory) ----+
//                            +--> held: peak, what was held then, when
//   tensors (tensor_bytes.h)-+         ^
//                                      phase (the engine), unit (each use)
//
// It belongs to the process. Engines of one process share a peak, the phase is
// the last one that any of them set, and units of two engines with one name are
// one unit. What other threads allocate counts in the current phase; while they
// do, the figures may be of slightly different instants.
//
// Cost: that of tensor_bytes.h, and a look at all counters whenever the peak of
// the step has grown by 64 KiB or 1/1024 (StepMemoryReport::at_peak).
//
// Threads: any; phases and steps must come in order.
#ifndef BASE_STEP_MEMORY_STEP_MEMORY_H_
#define BASE_STEP_MEMORY_STEP_MEMORY_H_

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/synchronization/mutex.h"
#include "base/memory/ledger_watch.h"
#include "base/step_memory/device_memory.h"
#include "base/step_memory/held_memory.h"
#include "base/step_memory/memory_timeline.h"
#include "base/step_memory/tensor_bytes.h"

namespace tessera {

class StepMemory final : public LedgerWatch {
 public:
  static StepMemory& Global();

  // Says that an engine trains: phases count while one does. The first one
  // begins a forward and a peak.
  class Training {
   public:
    Training();
    ~Training();
    Training(const Training&) = delete;
    Training& operator=(const Training&) = delete;
  };

  // Sets the phase for its life; then the phase before it continues. A
  // micro-batch's forward ends with the first phase that is not a forward.
  class PhaseScope {
   public:
    explicit PhaseScope(MemoryPhase phase);
    ~PhaseScope();
    PhaseScope(const PhaseScope&) = delete;
    PhaseScope& operator=(const PhaseScope&) = delete;

   private:
    const MemoryPhase before_;
  };

  // Returns the number of a unit for NoteUnitUse, from 1 on; a name always gets
  // the same number. From the 508th on units share one number, "(other units)".
  int UnitNumber(const std::string& name);

  // Ends a step and begins the next, whose peak begins with what is held now.
  StepMemoryReport EndStep();

  // Returns the bytes of tensors that libtorch's CPU allocator holds now.
  int64_t tensor_bytes() const;
  HeldMoment Now() const;

  // Refusal is what was held when memory was last refused, and the activations
  // then. `times` counts the refusals so far; 0: never.
  struct Refusal {
    int64_t times = 0;
    std::string device;      // whose memory it was: "cpu", "cuda:0"
    HeldMoment moment;       // on that device
    int64_t peak_bytes = 0;  // of the step until then
    std::vector<UnitActivations> activations;  // of the CPU alone
  };
  // Records that another than the ledger refuses memory that `ledger` counts.
  void NoteRefusal(const MemoryLedger& ledger = MemoryLedger::Host()) {
    Refused(ledger);
  }
  int64_t refusals() const { return refusals_.load(); }
  Refusal last_refusal() const;

  // Records from now on until the step ends; then TakeTimeline returns it,
  // once.
  void Record();
  bool records() const;
  std::optional<MemoryTimeline> TakeTimeline();

  // ---- LedgerWatch
  void Changed(const MemoryLedger& ledger, int64_t change) override;
  void Refused(const MemoryLedger& ledger) override;

  // ---- For DeviceMemory: `device` is looked at from AddDevice until
  // RemoveDevice.
  void AddDevice(DeviceMemory* device);
  void RemoveDevice(DeviceMemory* device);
  // Returns DeviceMemory::TakePeak with the unit's name.
  HeldMoment TakePeakOf(DeviceMemory* device);

 private:
  friend void tensor_bytes_internal::Grown(int64_t held);
  friend void tensor_bytes_internal::Shrunk();
  friend void tensor_bytes_internal::UnitChanged(int unit);

  struct Moment {
    HeldMemory held;
    MemoryPhase phase = MemoryPhase::kOutside;
    int unit = 0;
  };

  StepMemory();
  void LookAtDevices();
  void Grow(int64_t held);
  void Sample();
  void ChangeUnit(int unit);
  MemoryPhase SetPhase(MemoryPhase phase);  // returns the one before
  void SetSlot();
  int64_t Held() const;
  Moment NowLocked() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void TakePeak(int64_t held) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void BeginPeak() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void EndSlices(bool phase_too) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void TraceUnit() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void TakeActivations() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  std::vector<UnitActivations> ActivationsNow() const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  HeldMoment Named(const Moment& moment) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  const std::string& NameOf(int unit) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  std::atomic<MemoryPhase> phase_{MemoryPhase::kOutside};
  std::atomic<int> set_{0};            // which set of slots is this step's
  std::atomic<int64_t> next_look_{0};  // a peak above this is looked at
  std::atomic<int64_t> refusals_{0};

  std::atomic<int> num_devices_{0};
  mutable absl::Mutex devices_mutex_;  // locked before any other
  std::vector<DeviceMemory*> devices_ ABSL_GUARDED_BY(devices_mutex_);

  mutable absl::Mutex mutex_;  // locked last: no lock is taken while it is held
  int trainings_ ABSL_GUARDED_BY(mutex_) = 0;
  absl::flat_hash_map<std::string, int> numbers_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::string> names_ ABSL_GUARDED_BY(mutex_);
  // What each of this step's slots held when the step began, left from two
  // steps before.
  std::array<int64_t, kTensorSlotsOfSet> before_ ABSL_GUARDED_BY(mutex_){};
  Moment at_peak_ ABSL_GUARDED_BY(mutex_);
  int64_t recorded_peak_ ABSL_GUARDED_BY(mutex_) = 0;  // while recording
  bool forward_ended_ ABSL_GUARDED_BY(mutex_) = false;
  int64_t most_activations_ ABSL_GUARDED_BY(mutex_) = 0;
  std::vector<UnitActivations> activations_ ABSL_GUARDED_BY(mutex_);
  Refusal refusal_ ABSL_GUARDED_BY(mutex_);

  std::unique_ptr<MemoryTimeline> recording_ ABSL_GUARDED_BY(mutex_);
  int64_t phase_begin_ ABSL_GUARDED_BY(mutex_) = 0;  // nanoseconds
  int64_t unit_begin_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t traced_from_ ABSL_GUARDED_BY(mutex_) =
      0;  // when the unit began; 0: not known
  std::unique_ptr<MemoryTimeline> recorded_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace tessera
#endif  // BASE_STEP_MEMORY_STEP_MEMORY_H_
