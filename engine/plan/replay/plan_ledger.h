// PlanLedger: counts what a replay holds now, and what it held at its peak.
#ifndef ENGINE_PLAN_REPLAY_PLAN_LEDGER_H_
#define ENGINE_PLAN_REPLAY_PLAN_LEDGER_H_

#include <cstdint>

#include "engine/plan/replay/planned_memory.h"

namespace tessera {

class PlanLedger {
 public:
  void Add(PlanKind kind, int64_t bytes) {
    now_.Add(kind, bytes);
    if (now_.total() > most_.total()) {
      most_ = now_;
      when_ = moment_;
    }
  }
  void Remove(PlanKind kind, int64_t bytes) { now_.Add(kind, -bytes); }
  // Counts bytes that are held only for a moment.
  void Touch(PlanKind kind, int64_t bytes) {
    Add(kind, bytes);
    Remove(kind, bytes);
  }
  // Sets the moment of what follows.
  void SetMoment(int64_t moment) { moment_ = moment; }
  // Forgets the peak: only what follows counts.
  void ResetMost() {
    most_ = now_;
    when_ = moment_;
  }

  const PlannedBytes& now() const { return now_; }
  const PlannedBytes& most() const { return most_; }
  int64_t when() const { return when_; }

 private:
  PlannedBytes now_, most_;
  int64_t moment_ = 0, when_ = 0;
};

}  // namespace tessera
#endif  // ENGINE_PLAN_REPLAY_PLAN_LEDGER_H_
