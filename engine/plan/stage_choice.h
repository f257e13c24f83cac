// Chooses the ZeRO stage that a model needs without a trace of it: the bytes of
// its planned flats at each stage (replay/planned_flat.h), with what a step
// holds besides by the formulas of "ZeRO: Memory Optimizations Toward Training
// Trillion Parameter Models" (2020), and the lowest stage that fits.
//
// For P elements over W ranks (of a shard group), with B the largest unit:
//
//   stage  working copy      masters  gradients           optimizer
//   0      P                 P        P                   2P
//   1      P                 P/W      P (+ P/W, 16 bit)   2P/W
//   2      P                 P/W      P/W + 2B            2P/W
//   3      P/W + 3B          P/W      P/W + 2B            2P/W
//
// With sharding.step_in_backward gradients are 2B at all stages, and two
// shards, where no unit waits for a gradient. Accumulation adds P or P/W of
// gradients, accumulation on each rank P. Masters have memory of their own only
// where the working copy has 16 bits. Activations do not count.
#ifndef ENGINE_PLAN_STAGE_CHOICE_H_
#define ENGINE_PLAN_STAGE_CHOICE_H_

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "engine/plan/replay/planned_flat.h"
#include "engine/plan/replay/planned_memory.h"

namespace tessera {

// What decides besides the model.
struct StateOptions {
  bool has_optimizer = true;
  // Micro-batches are added up: reduced each time, or on each rank first.
  bool accumulates = false;
  bool accumulates_locally = false;
  // Units are stepped within backward: gradients are those of two units.
  bool uses_up = false;
};

// Returns the bytes of one rank, of the kinds that are no activations.
PlannedBytes ModelStateBytes(const PlannedFlats& planned,
                             const StateOptions& options);

// Returns how many elements of stage 3's units may be whole at once (the
// schedule's max_live) so that a rank, with its states by the formulas above,
// holds at most `limit_bytes`. It is never less than the two largest units
// together, whatever the limit; a model that fits whole is not bounded.
// `kept_bytes`: what is held besides.
int64_t MaxLiveWithin(const PlannedFlats& planned, const StateOptions& options,
                      int64_t kept_bytes, int64_t limit_bytes);

struct StageChoice {
  int stage = 0;
  std::string reason;  // for people: every stage's bytes, and the memory
};

// Returns the lowest stage whose bytes are at most `memory_bytes`.
// `bytes_at`: of stages 0 to 3. ResourceExhausted, with the figures, if stage 3
// needs more.
absl::StatusOr<StageChoice> ChooseStage(absl::Span<const int64_t> bytes_at,
                                        int group_size, int64_t memory_bytes);

}  // namespace tessera
#endif  // ENGINE_PLAN_STAGE_CHOICE_H_
