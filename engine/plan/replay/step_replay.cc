#include "engine/plan/replay/step_replay.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "engine/plan/replay/absences.h"
#include "engine/plan/replay/gradient_replay.h"

namespace tessera {
namespace {

// Steps until an engine knows what comes, and one more.
constexpr int kSteps = 3;

struct Gathered {
  int64_t bytes = 0, times = 0;
};

// A flat parameter whose working copy comes and goes.
class PlannedCopy final : public Gatherable {
 public:
  PlannedCopy(const PlannedFlat& flat, std::atomic<int64_t>* live,
              PlanLedger* held, Gathered* gathered)
      : flat_(flat), live_(live), held_(held), gathered_(gathered) {}

  int64_t whole_numel() const override { return flat_.whole_numel; }
  bool whole() const override { return whole_; }
  void StartGather(bool /*ahead*/) override {
    if (whole_) return;
    whole_ = true;
    *live_ += flat_.whole_numel;
    if (flat_.alone) return;
    gathered_->bytes += bytes();
    ++gathered_->times;
    held_->Add(PlanKind::kGathered, bytes());
  }
  bool TryFree() override {
    if (pins_ > 0) return false;
    if (std::exchange(whole_, false)) {
      *live_ -= flat_.whole_numel;
      if (!flat_.alone) held_->Remove(PlanKind::kGathered, bytes());
    }
    return true;
  }
  void FreeWhenUnpinned() override { free_later_ = !TryFree(); }
  void DropSecondary() override {}

  void Pin() { ++pins_; }
  void Unpin() {
    if (--pins_ > 0) return;
    if (std::exchange(free_later_, false)) TryFree();
  }

 private:
  int64_t bytes() const { return flat_.whole_numel * flat_.working_bytes; }

  const PlannedFlat& flat_;
  std::atomic<int64_t>* const live_;
  PlanLedger* const held_;
  Gathered* const gathered_;
  int pins_ = 0;
  bool whole_ = false, free_later_ = false;
};

class Replay {
 public:
  Replay(const Trace& trace, const std::vector<PlannedFlat>& flats,
         const std::vector<int>& flat_of, const StepReplayOptions& options);
  StepReplayResult Run();

 private:
  void MicroBatch(bool reduces);
  void LeaveAndReturn(int64_t event);
  void RunAgain(const Rerun& rerun);
  void Add(size_t allocation);
  void Remove(size_t allocation);
  void Handle(const TraceEvent& event);
  void Allocate(const TraceEvent& event);
  void Use(int32_t parameter, bool backward);
  void UseInNode(int32_t parameter, int64_t node);
  void TakeGradient(const TraceEvent& event);
  static void UnpinAll(std::vector<PlannedCopy*>* pinned);

  const Trace& trace_;
  const std::vector<PlannedFlat>& flats_;
  const std::vector<int>& flat_of_;
  const StepReplayOptions& options_;
  PlanLedger held_;
  Schedule schedule_;
  GradientReplay gradients_;
  std::vector<std::unique_ptr<PlannedCopy>> copies_;  // null: never freed
  // By the operator that runs, and by the last node of backward that used any.
  std::vector<PlannedCopy*> pinned_, node_pinned_;
  int64_t node_ = -1;
  // By allocation.
  struct Allocation {
    int64_t bytes = 0;
    bool counted = false;
  };
  std::vector<Allocation> allocations_;
  std::vector<int> expected_;                 // gradients, by flat
  std::vector<Absence> leaving_, returning_;  // by event
  Recomputation recomputation_;
  size_t left_ = 0, returned_ = 0, rerun_ = 0;  // of these, in a micro-batch
  Gathered gathered_;
};

Replay::Replay(const Trace& trace, const std::vector<PlannedFlat>& flats,
               const std::vector<int>& flat_of,
               const StepReplayOptions& options)
    : trace_(trace),
      flats_(flats),
      flat_of_(flat_of),
      options_(options),
      schedule_(options.schedule),
      gradients_(flats, options.gradients, options.world_size, &held_),
      expected_(flats.size()) {
  std::vector<Gatherable*> freeable;
  for (const PlannedFlat& flat : flats) {
    copies_.emplace_back();
    if (flat.sharded_parameters && !options.shares_working_copy) {
      copies_.back() = std::make_unique<PlannedCopy>(
          flat, schedule_.live_counter(), &held_, &gathered_);
      freeable.push_back(copies_.back().get());
    }
  }
  schedule_.Start(std::move(freeable));
  std::vector<bool> owned;
  for (const int flat : flat_of) owned.push_back(flat >= 0);
  leaving_ = CastAbsences(trace, owned);
  recomputation_ = Recompute(trace, options.recomputed);
  leaving_.insert(leaving_.end(), recomputation_.absences.begin(),
                  recomputation_.absences.end());
  for (const Absence& absence : leaving_) {
    if (absence.until >= 0) returning_.push_back(absence);
  }
  std::sort(leaving_.begin(), leaving_.end(),
            [](const auto& a, const auto& b) { return a.from < b.from; });
  std::sort(returning_.begin(), returning_.end(),
            [](const auto& a, const auto& b) { return a.until < b.until; });
  for (const TraceEvent& event : trace.events) {
    if (event.kind == TraceEvent::Kind::kAllocate) {
      allocations_.push_back({event.bytes});
    } else if (event.kind == TraceEvent::Kind::kGradient) {
      const int flat = flat_of[static_cast<size_t>(event.what)];
      if (flat < 0) continue;
      ++expected_[static_cast<size_t>(flat)];
    }
  }
}

void Replay::UnpinAll(std::vector<PlannedCopy*>* pinned) {
  for (PlannedCopy* copy : std::exchange(*pinned, {})) copy->Unpin();
}

// As sharding/dispatch/saved_tensors.cc: pinned until another node uses any.
void Replay::UseInNode(int32_t parameter, int64_t node) {
  if (std::exchange(node_, node) != node) UnpinAll(&node_pinned_);
  Use(parameter, /*backward=*/true);
  node_pinned_.insert(node_pinned_.end(), pinned_.begin(), pinned_.end());
  pinned_.clear();
}

void Replay::Use(int32_t parameter, bool backward) {
  const int flat = flat_of_[static_cast<size_t>(parameter)];
  if (flat < 0) return;
  PlannedCopy* const copy = copies_[static_cast<size_t>(flat)].get();
  if (copy == nullptr) return;
  copy->Pin();
  schedule_.Touch(copy, backward ? Phase::kBackward : Phase::kForward);
  copy->StartGather(/*ahead=*/false);
  pinned_.push_back(copy);
}

void Replay::Allocate(const TraceEvent& event) {
  Allocation& allocation = allocations_[static_cast<size_t>(event.what)];
  allocation.counted = true;
  held_.Add(PlanKind::kActivations, allocation.bytes);
}

void Replay::Add(size_t allocation) {
  Allocation& added = allocations_[allocation];
  if (std::exchange(added.counted, true)) return;
  held_.Add(PlanKind::kActivations, added.bytes);
}

void Replay::Remove(size_t allocation) {
  Allocation& removed = allocations_[allocation];
  if (!std::exchange(removed.counted, false)) return;
  held_.Remove(PlanKind::kActivations, removed.bytes);
}

// What is absent is freed by nobody in the meantime: it was saved.
void Replay::LeaveAndReturn(int64_t event) {
  for (; left_ < leaving_.size() && leaving_[left_].from <= event; ++left_) {
    Remove(static_cast<size_t>(leaving_[left_].allocation));
  }
  for (; returned_ < returning_.size() && returning_[returned_].until <= event;
       ++returned_) {
    const Absence& absence = returning_[returned_];
    if (absence.cast_of >= 0) {
      UseInNode(absence.cast_of,
                trace_.events[static_cast<size_t>(event)].forward);
    }
    Add(static_cast<size_t>(absence.allocation));
  }
  const std::vector<Rerun>& reruns = recomputation_.reruns;
  for (; rerun_ < reruns.size() && reruns[rerun_].event <= event; ++rerun_) {
    RunAgain(reruns[rerun_]);
  }
}

void Replay::RunAgain(const Rerun& rerun) {
  const TraceEvent& node = trace_.events[static_cast<size_t>(rerun.event)];
  for (const int32_t parameter : rerun.used_before) {
    UseInNode(parameter, node.forward);
  }
  for (const TraceEvent& step : rerun.steps) {
    if (step.kind == TraceEvent::Kind::kTouch) {
      Use(step.what, /*backward=*/true);
    } else if (step.kind == TraceEvent::Kind::kOperator) {
      held_.Touch(PlanKind::kKernels, step.bytes);
      UnpinAll(&pinned_);
    } else if (step.what >= 0) {
      Add(static_cast<size_t>(step.what));
    } else if (step.kind == TraceEvent::Kind::kAllocate) {
      held_.Add(PlanKind::kActivations, step.bytes);
    } else {
      held_.Remove(PlanKind::kActivations, step.bytes);
    }
  }
}

// It is copied to its place, and gone.
void Replay::TakeGradient(const TraceEvent& event) {
  const int flat = flat_of_[static_cast<size_t>(event.what)];
  if (flat < 0) return;
  gradients_.Copy(static_cast<size_t>(flat));
  if (event.other >= 0) Remove(static_cast<size_t>(event.other));
  gradients_.Arrived(static_cast<size_t>(flat));
}

void Replay::Handle(const TraceEvent& event) {
  switch (event.kind) {
    case TraceEvent::Kind::kAllocate:
      Allocate(event);
      break;
    case TraceEvent::Kind::kFree:
      if (recomputation_.outlives[static_cast<size_t>(event.what)]) break;
      Remove(static_cast<size_t>(event.what));
      break;
    case TraceEvent::Kind::kOperator:
      held_.Touch(PlanKind::kKernels, event.bytes);
      UnpinAll(&pinned_);
      break;
    case TraceEvent::Kind::kBegin:
      break;
    case TraceEvent::Kind::kTouch:
      if (event.backward) {
        UseInNode(event.what, event.forward);
      } else {
        Use(event.what, /*backward=*/false);
      }
      break;
    case TraceEvent::Kind::kGradient:
      TakeGradient(event);
      break;
  }
}

void Replay::MicroBatch(bool reduces) {
  bool begun = false;
  left_ = returned_ = rerun_ = 0;
  for (size_t i = 0; i < trace_.events.size(); ++i) {
    held_.SetMoment(static_cast<int64_t>(i));
    const TraceEvent& event = trace_.events[i];
    if (event.backward && !std::exchange(begun, true)) {
      gradients_.Begin(expected_, reduces);
    }
    LeaveAndReturn(static_cast<int64_t>(i));
    Handle(event);
  }
  UnpinAll(&pinned_);
  UnpinAll(&node_pinned_);
  gradients_.End();
  schedule_.EndPass();
  // What the trace leaves (gradients of parameters that are no engine's).
  for (size_t i = 0; i < allocations_.size(); ++i) Remove(i);
}

StepReplayResult Replay::Run() {
  held_.Add(PlanKind::kParameters, options_.buffer_bytes);
  held_.Add(PlanKind::kOptimizer, options_.stream_bytes);
  for (const PlannedFlat& flat : flats_) {
    const PlannedBytes bytes = BytesBetweenSteps(flat, options_.has_optimizer,
                                                 options_.shares_working_copy);
    for (int k = 0; k < kNumPlanKinds; ++k) {
      const auto kind = static_cast<PlanKind>(k);
      held_.Add(kind, bytes[kind]);
    }
  }
  // Three micro-batches stand for any number: all between the first and the
  // last are like the second.
  const int64_t micro_batches = std::min<int64_t>(options_.micro_batches, 3);
  StepReplayResult result;
  for (int step = 0; step < kSteps; ++step) {
    held_.ResetMost();
    gathered_ = {};
    const int64_t reduced = gradients_.reduced_bytes();
    const int64_t reductions = gradients_.reductions();
    for (int64_t m = 0; m < micro_batches; ++m) {
      MicroBatch(!options_.accumulates_locally || m + 1 == micro_batches);
    }
    gradients_.Zero();
    result.reduced_bytes = gradients_.reduced_bytes() - reduced;
    result.reductions = gradients_.reductions() - reductions;
  }
  result.between_steps = held_.now();
  result.peak = held_.most();
  result.peak_event = held_.when();
  const auto of_all = [&](int64_t some) {
    return some / micro_batches * options_.micro_batches;
  };
  result.gathered_bytes = of_all(gathered_.bytes);
  result.gathers = of_all(gathered_.times);
  if (!options_.accumulates_locally) {
    result.reduced_bytes = of_all(result.reduced_bytes);
    result.reductions = of_all(result.reductions);
  }
  result.recomputation = std::move(recomputation_);
  return result;
}

}  // namespace

StepReplayResult ReplayStep(const Trace& trace,
                            const std::vector<PlannedFlat>& flats,
                            const std::vector<int>& flat_of,
                            const StepReplayOptions& options) {
  return Replay(trace, flats, flat_of, options).Run();
}

}  // namespace tessera
