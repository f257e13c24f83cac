// There are two sets of slots because a tensor that outlives its step (the last
// loss, the next batch) keeps the slot that its deleter knows. With one set,
// the step that frees it would seem to have freed activations of its own. What
// lives for two steps counts in this step's set again: `before_` says how much.
#include "base/step_memory/step_memory.h"

#include <algorithm>
#include <utility>

#include "absl/time/time.h"
#include "base/monotonic.h"
#include "base/trace/trace.h"

namespace tessera {

namespace tensor_bytes_internal {

Counters g_counters;

void Grown(int64_t held) { StepMemory::Global().Grow(held); }
void Shrunk() { StepMemory::Global().Sample(); }
void UnitChanged(int unit) { StepMemory::Global().ChangeUnit(unit); }

}  // namespace tensor_bytes_internal

namespace {

using tensor_bytes_internal::g_counters;

// Slots within a set.
enum Slot { kOutsideSlot, kBackwardSlot, kStepSlot, kForwardSlot };
constexpr int kOthersSlot = kTensorSlotsOfSet - 1;
constexpr int kLastUnit = kOthersSlot - kForwardSlot;

int64_t NowNanos() { return absl::ToInt64Nanoseconds(MonotonicNow()); }

int64_t BytesOf(int set, int slot) {
  return g_counters.by_slot[static_cast<size_t>(set * kTensorSlotsOfSet + slot)]
      .load(std::memory_order_relaxed);
}

}  // namespace

StepMemory& StepMemory::Global() {
  static StepMemory* const memory = [] {
    auto* const made = new StepMemory;
    SetLedgerWatch(made);
    return made;
  }();
  return *memory;
}

StepMemory::StepMemory() : names_{""} {}

StepMemory::Training::Training() {
  StepMemory& memory = Global();
  absl::MutexLock lock(&memory.mutex_);
  if (memory.trainings_++ > 0) return;
  memory.phase_ = MemoryPhase::kForward;
  g_counters.unit = 0;
  memory.SetSlot();
  memory.BeginPeak();
}

StepMemory::Training::~Training() {
  StepMemory& memory = Global();
  absl::MutexLock lock(&memory.mutex_);
  if (--memory.trainings_ > 0) return;
  memory.phase_ = MemoryPhase::kOutside;
  g_counters.unit = 0;
  memory.SetSlot();
}

StepMemory::PhaseScope::PhaseScope(MemoryPhase phase)
    : before_(Global().SetPhase(phase)) {}
StepMemory::PhaseScope::~PhaseScope() { Global().SetPhase(before_); }

int StepMemory::UnitNumber(const std::string& name) {
  absl::MutexLock lock(&mutex_);
  const auto found = numbers_.find(name);
  if (found != numbers_.end()) return found->second;
  const int next = static_cast<int>(names_.size());
  if (next >= kLastUnit) {
    if (next == kLastUnit) names_.push_back("(other units)");
    return kLastUnit;
  }
  names_.push_back(name);
  numbers_[name] = next;
  return next;
}

const std::string& StepMemory::NameOf(int unit) const {
  return names_[static_cast<size_t>(unit)];
}

// Sets where what is made from now on is counted.
void StepMemory::SetSlot() {
  int slot = kOutsideSlot;
  switch (phase_.load()) {
    case MemoryPhase::kOutside:
      break;
    case MemoryPhase::kForward:
      slot = kForwardSlot + g_counters.unit.load(std::memory_order_relaxed);
      break;
    case MemoryPhase::kBackward:
      slot = kBackwardSlot;
      break;
    case MemoryPhase::kStep:
      slot = kStepSlot;
      break;
  }
  g_counters.slot = set_.load() * kTensorSlotsOfSet + slot;
}

void StepMemory::AddDevice(DeviceMemory* device) {
  absl::MutexLock lock(&devices_mutex_);
  devices_.push_back(device);
  ++num_devices_;
}

void StepMemory::RemoveDevice(DeviceMemory* device) {
  absl::MutexLock lock(&devices_mutex_);
  devices_.erase(std::find(devices_.begin(), devices_.end(), device));
  --num_devices_;
}

// Looks at the devices: what has run until now ends, and the moment has its
// unit and phase.
void StepMemory::LookAtDevices() {
  if (num_devices_.load(std::memory_order_relaxed) == 0) return;
  absl::MutexLock lock(&devices_mutex_);
  for (DeviceMemory* const device : devices_) {
    device->Look(phase_.load(),
                 g_counters.unit.load(std::memory_order_relaxed));
  }
}

HeldMoment StepMemory::TakePeakOf(DeviceMemory* device) {
  const DeviceMemory::Moment peak = device->TakePeak();
  absl::MutexLock lock(&mutex_);
  return {peak.held, peak.phase, NameOf(peak.unit)};
}

// Records which unit was used until now, for a trace.
void StepMemory::TraceUnit() {
  const int64_t now = TraceRecords() ? TraceNow() : 0;
  const std::string& unit = NameOf(g_counters.unit.load());
  if (!unit.empty() && traced_from_ != 0 && now != 0) {
    AddTraceSpan({TraceTrack::kUnits, unit, traced_from_, now, unit});
  }
  traced_from_ = now;
}

void StepMemory::ChangeUnit(int unit) {
  LookAtDevices();
  if (TraceRecords()) {
    absl::MutexLock lock(&mutex_);
    TraceUnit();
  }
  if (!g_counters.records.load(std::memory_order_relaxed)) {
    g_counters.unit.store(unit, std::memory_order_relaxed);
    if (phase_.load() == MemoryPhase::kForward) SetSlot();
    return;
  }
  absl::MutexLock lock(&mutex_);
  EndSlices(/*phase_too=*/false);
  g_counters.unit.store(unit, std::memory_order_relaxed);
  SetSlot();
}

MemoryPhase StepMemory::SetPhase(MemoryPhase phase) {
  LookAtDevices();
  absl::MutexLock lock(&mutex_);
  const MemoryPhase before = phase_;
  if (trainings_ == 0) return before;
  EndSlices(/*phase_too=*/true);
  TraceUnit();
  const bool forward = phase == MemoryPhase::kForward;
  if (!forward && !forward_ended_) TakeActivations();
  forward_ended_ = !forward;
  if (phase != MemoryPhase::kBackward) g_counters.unit = 0;
  phase_ = phase;
  SetSlot();
  return before;
}

int64_t StepMemory::tensor_bytes() const { return g_counters.all.load(); }

int64_t StepMemory::Held() const {
  return tensor_bytes() + MemoryLedger::Host().total().current_bytes;
}

StepMemory::Moment StepMemory::NowLocked() const {
  Moment moment;
  const MemoryReport ledger = MemoryLedger::Host().Report();
  for (size_t i = 0; i < kNumMemoryKinds; ++i) {
    moment.held.by_kind[i] = ledger.by_kind[i].current_bytes;
  }
  const int set = set_.load();
  const auto of_step = [&](int slot) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return std::max<int64_t>(
        0, BytesOf(set, slot) - before_[static_cast<size_t>(slot)]);
  };
  const int num_units = static_cast<int>(names_.size());
  int64_t activations = 0;
  for (int unit = 0; unit < num_units; ++unit) {
    activations += of_step(kForwardSlot + unit);
  }
  const int64_t temporary = of_step(kBackwardSlot) + of_step(kStepSlot);
  auto& by_kind = moment.held.by_kind;
  by_kind[static_cast<size_t>(HeldKind::kActivations)] = activations;
  by_kind[static_cast<size_t>(HeldKind::kTemporary)] = temporary;
  by_kind[static_cast<size_t>(HeldKind::kTensors)] =
      std::max<int64_t>(0, tensor_bytes() - activations - temporary);
  moment.phase = phase_.load();
  moment.unit = g_counters.unit.load(std::memory_order_relaxed);
  return moment;
}

HeldMoment StepMemory::Named(const Moment& moment) const {
  return {moment.held, moment.phase, NameOf(moment.unit)};
}

HeldMoment StepMemory::Now() const {
  absl::MutexLock lock(&mutex_);
  return Named(NowLocked());
}

// Begins the step's peak with what is held now.
void StepMemory::BeginPeak() {
  const int64_t held = Held();
  recorded_peak_ = held;
  if (recording_ == nullptr) g_counters.floor = held;
  at_peak_ = NowLocked();
  next_look_ = held;
}

// Records that `held` is a peak, whose kinds nobody has looked at yet.
void StepMemory::TakePeak(int64_t held) {
  constexpr int64_t kGrainBytes = 64 << 10;
  at_peak_ = NowLocked();
  next_look_ = held + std::max(kGrainBytes, held >> 10);
}

void StepMemory::Grow(int64_t held) {
  if (g_counters.records.load(std::memory_order_relaxed)) {
    Sample();
    return;
  }
  int64_t floor = g_counters.floor.load(std::memory_order_relaxed);
  while (floor < held && !g_counters.floor.compare_exchange_weak(
                             floor, held, std::memory_order_relaxed)) {
  }
  if (held <= next_look_.load(std::memory_order_relaxed)) return;
  absl::MutexLock lock(&mutex_);
  if (held > next_look_) TakePeak(held);
}

void StepMemory::Sample() {
  absl::MutexLock lock(&mutex_);
  if (recording_ == nullptr) return;
  const Moment now = NowLocked();
  recording_->AddSample({NowNanos(), now.held});
  const int64_t held = now.held.total();
  recorded_peak_ = std::max(recorded_peak_, held);
  if (held > next_look_) TakePeak(held);
}

void StepMemory::Changed(const MemoryLedger& ledger, int64_t change) {
  if (!ledger.of_host()) return;  // devices are looked at from time to time
  if (change < 0) {
    if (g_counters.records.load(std::memory_order_relaxed)) Sample();
    return;
  }
  const int64_t held = Held();
  if (held > g_counters.floor.load(std::memory_order_relaxed)) Grow(held);
}

std::vector<UnitActivations> StepMemory::ActivationsNow() const {
  std::vector<UnitActivations> all;
  for (int unit = 0; unit < static_cast<int>(names_.size()); ++unit) {
    const auto slot = static_cast<size_t>(kForwardSlot + unit);
    const int64_t bytes =
        BytesOf(set_.load(), kForwardSlot + unit) - before_[slot];
    if (bytes > 0) all.push_back({NameOf(unit), bytes});
  }
  return all;
}

void StepMemory::TakeActivations() {
  int64_t bytes = 0;
  for (int unit = 0; unit < static_cast<int>(names_.size()); ++unit) {
    bytes += BytesOf(set_.load(), kForwardSlot + unit) -
             before_[static_cast<size_t>(kForwardSlot + unit)];
  }
  if (bytes <= most_activations_) return;
  most_activations_ = bytes;
  activations_ = ActivationsNow();
}

StepMemoryReport StepMemory::EndStep() {
  absl::MutexLock lock(&mutex_);
  StepMemoryReport report;
  report.peak_bytes =
      recording_ != nullptr ? recorded_peak_ : g_counters.floor.load();
  report.host_peak_bytes = report.peak_bytes;
  report.at_peak = Named(at_peak_);
  report.activations = std::move(activations_);
  if (recording_ != nullptr) {
    // A step ends after its Step: what has begun since is the next step's
    // forward.
    EndSlices(/*phase_too=*/phase_.load() != MemoryPhase::kForward);
    g_counters.records = false;
    recording_->report = report;
    recorded_ = std::move(recording_);
  }
  activations_.clear();
  most_activations_ = 0;
  set_ = 1 - set_.load();
  for (int slot = 0; slot < kTensorSlotsOfSet; ++slot) {
    before_[static_cast<size_t>(slot)] = BytesOf(set_.load(), slot);
  }
  SetSlot();
  BeginPeak();
  return report;
}

void StepMemory::Refused(const MemoryLedger& ledger) {
  HeldMemory on_device;
  int64_t peak = 0;
  if (!ledger.of_host()) {
    on_device = DeviceMemory::HeldOn(ledger, 0);
    absl::MutexLock lock(&devices_mutex_);
    for (const DeviceMemory* const device : devices_) {
      if (&device->ledger() != &ledger) continue;
      on_device = device->Now();
      peak = device->peak().held.total();
    }
    peak = std::max(peak, on_device.total());
  }
  absl::MutexLock lock(&mutex_);
  refusal_.times = ++refusals_;
  refusal_.device = ledger.device();
  refusal_.moment = Named(NowLocked());
  if (!ledger.of_host()) {
    refusal_.moment.held = on_device;
    refusal_.peak_bytes = peak;
    refusal_.activations.clear();
    return;
  }
  // Before the first step nothing is recorded.
  refusal_.peak_bytes = std::max(
      refusal_.moment.held.total(),
      recording_ != nullptr ? recorded_peak_ : g_counters.floor.load());
  refusal_.activations = ActivationsNow();
}

StepMemory::Refusal StepMemory::last_refusal() const {
  absl::MutexLock lock(&mutex_);
  return refusal_;
}

// Ends the recording's slices now.
void StepMemory::EndSlices(bool phase_too) {
  if (recording_ == nullptr) return;
  const int64_t now = NowNanos();
  const int unit = g_counters.unit.load(std::memory_order_relaxed);
  if (unit != 0) recording_->AddUnit({NameOf(unit), unit_begin_, now});
  unit_begin_ = now;
  if (!phase_too) return;
  recording_->phases.push_back(
      {std::string(MemoryPhaseName(phase_.load())), phase_begin_, now});
  phase_begin_ = now;
}

void StepMemory::Record() {
  absl::MutexLock lock(&mutex_);
  if (recording_ != nullptr) return;
  recording_ = std::make_unique<MemoryTimeline>();
  recorded_peak_ = trainings_ > 0 ? g_counters.floor.load() : Held();
  phase_begin_ = unit_begin_ = NowNanos();
  recording_->AddSample({phase_begin_, NowLocked().held});
  g_counters.records = true;
  g_counters.floor = INT64_MIN;
}

bool StepMemory::records() const {
  absl::MutexLock lock(&mutex_);
  return recording_ != nullptr;
}

std::optional<MemoryTimeline> StepMemory::TakeTimeline() {
  absl::MutexLock lock(&mutex_);
  if (recorded_ == nullptr) return std::nullopt;
  MemoryTimeline timeline = *std::move(recorded_);
  recorded_.reset();
  return timeline;
}

}  // namespace tessera
