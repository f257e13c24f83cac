#include "engine/build/stage_choice.h"

#include <algorithm>
#include <functional>
#include <limits>
#include <map>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace tessera {
namespace {

std::string Mib(int64_t bytes) {
  return absl::StrFormat("%.1f MiB", static_cast<double>(bytes) / (1 << 20));
}

}  // namespace

StageBytes ModelStateBytes(absl::Span<const FlatSize> flats, int stage,
                           int group_size, const StateOptions& options) {
  StageBytes bytes;
  int64_t largest_whole = 0, largest_gradient = 0;
  for (const FlatSize& f : flats) {
    const int64_t shard = (f.numel + group_size - 1) / group_size;
    const int64_t owned = stage >= 1 ? shard : f.numel;
    const bool sharded = stage >= 3 && !f.persistent;
    const auto stays = [&](bool elsewhere, int least_stage) {
      const bool there = f.at_all_stages ? stage >= least_stage : sharded;
      return !elsewhere || !there;
    };
    if (!sharded || !f.parameters_elsewhere) {
      bytes.parameters += (sharded ? shard : f.numel) * f.working_bytes;
    }
    // A rank that is alone has it whole already (sharding/copy/lone_copy.h).
    if (sharded && (group_size > 1 || f.parameters_elsewhere)) {
      largest_whole = std::max(largest_whole, f.numel * f.working_bytes);
    }
    if (!f.trainable) continue;
    if (options.has_optimizer) bytes.optimizer += f.shaped_state_bytes;
    if (stays(f.states_elsewhere, 1)) {
      bytes.parameters += owned * f.master_bytes;
      if (options.has_optimizer) {
        bytes.optimizer += owned * f.optimizer_block_bytes / 64;
      }
    }
    if (options.accumulates) {
      bytes.gradients += options.accumulates_locally ? f.numel * f.local_bytes
                                                     : owned * f.gradient_bytes;
    }
    if (stage >= 2) {
      if (stays(f.gradients_elsewhere, 2)) {
        bytes.gradients += owned * f.gradient_bytes;
      }
      largest_gradient = std::max(largest_gradient, f.numel * f.reduce_bytes);
    } else {
      bytes.gradients += f.numel * f.reduce_bytes;
      // In place where both are of one dtype.
      if (!f.keeps_sums) {
        bytes.gradients += owned * f.gradient_bytes;
      }
    }
  }
  if (stage >= 3) bytes.optimizer += options.stream_bytes;
  bytes.parameters += 3 * largest_whole;
  bytes.gradients += 2 * largest_gradient;
  return bytes;
}

int64_t MaxLiveWithin(absl::Span<const FlatSize> flats, int group_size,
                      const StateOptions& options, int64_t kept_bytes,
                      int64_t limit_bytes) {
  std::map<int, int64_t, std::greater<>> numel_of;  // by bytes, largest first
  int64_t largest = 0, second = 0, largest_bytes = 0;
  for (const FlatSize& f : flats) {
    if (f.persistent) continue;
    numel_of[f.working_bytes] += f.numel;
    largest_bytes = std::max(largest_bytes, f.numel * f.working_bytes);
    second = std::max(second, std::min(largest, f.numel));
    largest = std::max(largest, f.numel);
  }
  // Two of the three units in flight already count among those that are whole.
  int64_t room =
      limit_bytes - kept_bytes + 2 * largest_bytes -
      ModelStateBytes(flats, /*stage=*/3, group_size, options).total();
  int64_t numel = 0;
  for (const auto& [bytes, n] : numel_of) {
    const int64_t fits = std::min(n, std::max<int64_t>(room, 0) / bytes);
    numel += fits;
    room -= fits * bytes;
    if (fits < n) return std::max(numel, largest + second);
  }
  return std::numeric_limits<int64_t>::max();
}

absl::StatusOr<StageChoice> ChooseStage(absl::Span<const FlatSize> flats,
                                        int group_size,
                                        const StateOptions& options,
                                        int64_t memory_bytes) {
  StageChoice choice;
  choice.stage = -1;
  std::string needs;
  for (int stage = 0; stage <= 3; ++stage) {
    const int64_t total =
        ModelStateBytes(flats, stage, group_size, options).total();
    absl::StrAppend(&needs, stage == 0 ? "" : ", ", "stage ", stage, " ",
                    Mib(total));
    if (choice.stage < 0 && total <= memory_bytes) choice.stage = stage;
  }
  const std::string figures =
      absl::StrCat("model states on each of ", group_size, " ranks: ", needs,
                   "; memory: ", Mib(memory_bytes));
  if (choice.stage < 0) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "no stage fits: ", figures,
        "; use more ranks (of a shard group), a 16-bit dtype, or a higher "
        "sharding.memory_limit_bytes"));
  }
  choice.reason =
      absl::StrCat("stage ", choice.stage,
                   choice.stage == 0 ? " (plain replication, DDP)" : "",
                   ", the lowest that ", "fits: ", figures);
  return choice;
}

}  // namespace tessera
