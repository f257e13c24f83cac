// Chooses the ZeRO stage that a model needs: the bytes of its states at each
// stage, by the formulas of "ZeRO: Memory Optimizations Toward Training
// Trillion Parameter Models" (2020), with this engine's own extra memory; and
// the lowest stage that fits.
//
// For P elements over W ranks (of a shard group), with B the largest unit:
//
//   stage  working copy      masters  gradients           optimizer
//   0      P                 P        P                   2P
//   1      P                 P/W      P (+ P/W, 16 bit)   2P/W
//   2      P                 P/W      P/W + 2B            2P/W
//   3      P/W + 3B          P/W      P/W + 2B            2P/W
//
// Accumulation adds P or P/W of gradients, accumulation on each rank P.
// Masters have memory of their own only where the working copy has 16 bits.
// Activations do not count.
#ifndef ENGINE_BUILD_STAGE_CHOICE_H_
#define ENGINE_BUILD_STAGE_CHOICE_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"

namespace tessera {

// One flat buffer. Bytes are per element.
struct FlatSize {
  int64_t numel = 0;
  int working_bytes = 4;
  int master_bytes = 0;  // of masters with memory of their own, else 0
  int reduce_bytes = 4;
  int gradient_bytes = 4;  // of gradient shards
  int local_bytes = 4;     // of gradients that are not reduced yet
  bool keeps_sums = true;  // gradient shards are of the sums' dtype
  bool trainable = true;
  bool persistent = false;
  // At stage 3: masters and optimizer states are offloaded; the shards are.
  bool states_elsewhere = false, parameters_elsewhere = false;
  bool gradients_elsewhere = false;
  // States and gradients are offloaded wherever they are sharded, below stage
  // 3, too.
  bool at_all_stages = false;
  // Bytes of all optimizer states of 64 elements.
  int64_t optimizer_block_bytes = 2 * 4 * 64;
  // Bytes of states with shapes of their own, on every rank.
  int64_t shaped_state_bytes = 0;
};

struct StageBytes {
  int64_t parameters = 0;  // masters included
  int64_t gradients = 0;
  int64_t optimizer = 0;
  int64_t total() const { return parameters + gradients + optimizer; }
};

// What decides besides the model.
struct StateOptions {
  bool has_optimizer = true;
  // Micro-batches are added up: reduced each time, or on each rank first.
  bool accumulates = false;
  bool accumulates_locally = false;
  int64_t stream_bytes = 0;  // for what is on a disk, at stage 3
};

// Returns the bytes of one rank of a shard group of `group_size`. Padding,
// below 256 bytes a parameter, does not count.
StageBytes ModelStateBytes(absl::Span<const FlatSize> flats, int stage,
                           int group_size, const StateOptions& options);

// Returns how many elements of stage 3's units may be whole at once (the
// schedule's max_live) so that a rank, with its states by the formulas above,
// holds at most `limit_bytes`. It is never less than the two largest units
// together, whatever the limit; a model that fits whole is not bounded.
// `flats`: with their padding. `kept_bytes`: what is held besides.
int64_t MaxLiveWithin(absl::Span<const FlatSize> flats, int group_size,
                      const StateOptions& options, int64_t kept_bytes,
                      int64_t limit_bytes);

struct StageChoice {
  int stage = 0;
  std::string reason;  // for people: every stage's bytes, and the memory
};

// Returns the lowest stage that needs at most `memory_bytes`.
// ResourceExhausted, with the figures, if stage 3 needs more.
absl::StatusOr<StageChoice> ChooseStage(absl::Span<const FlatSize> flats,
                                        int group_size,
                                        const StateOptions& options,
                                        int64_t memory_bytes);

}  // namespace tessera
#endif  // ENGINE_BUILD_STAGE_CHOICE_H_
