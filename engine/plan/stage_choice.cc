#include "engine/plan/stage_choice.h"

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

PlannedBytes ModelStateBytes(const PlannedFlats& planned,
                             const StateOptions& options) {
  PlannedBytes bytes;
  bytes.Add(PlanKind::kOptimizer, planned.stream_bytes);
  int64_t largest_whole = 0, largest_gradient = 0;
  for (const PlannedFlat& f : planned.flats) {
    bytes += BytesBetweenSteps(f, options.has_optimizer, /*shared=*/false);
    // A rank that is alone has it whole already (sharding/copy/lone_copy.h).
    if (f.sharded_parameters && !f.alone) {
      largest_whole = std::max(largest_whole, f.whole_numel * f.working_bytes);
    }
    if (!f.trained) continue;
    if (options.uses_up) {
      const int64_t sums = f.sharded_gradients || !f.keeps_sums
                               ? f.owned_numel() * f.gradient_bytes
                               : 0;
      largest_gradient =
          std::max(largest_gradient, f.whole_numel * f.reduce_bytes + sums);
      continue;
    }
    int64_t gradients = 0;
    if (options.accumulates) {
      gradients += options.accumulates_locally
                       ? f.whole_numel * f.local_bytes
                       : f.owned_numel() * f.gradient_bytes;
    }
    if (f.sharded_gradients) {
      if (f.gradients == Tier::kMemory) {
        gradients += f.owned_numel() * f.gradient_bytes;
      }
      largest_gradient =
          std::max(largest_gradient, f.whole_numel * f.reduce_bytes);
    } else {
      gradients += f.whole_numel * f.reduce_bytes;
      // In place where both are of one dtype.
      if (!f.keeps_sums) gradients += f.owned_numel() * f.gradient_bytes;
    }
    bytes.Add(PlanKind::kGradients, gradients);
  }
  bytes.Add(PlanKind::kGathered, 3 * largest_whole);
  bytes.Add(PlanKind::kGradients, 2 * largest_gradient);
  return bytes;
}

int64_t MaxLiveWithin(const PlannedFlats& planned, const StateOptions& options,
                      int64_t kept_bytes, int64_t limit_bytes) {
  // By bytes, largest first.
  std::map<int64_t, int64_t, std::greater<>> numel_of;
  int64_t largest = 0, second = 0, largest_bytes = 0;
  for (const PlannedFlat& f : planned.flats) {
    if (!f.sharded_parameters) continue;  // it persists
    const int64_t numel = f.whole_numel;
    numel_of[f.working_bytes] += numel;
    largest_bytes = std::max(largest_bytes, numel * f.working_bytes);
    second = std::max(second, std::min(largest, numel));
    largest = std::max(largest, numel);
  }
  // Two of the three units in flight already count among those that are whole.
  int64_t room = limit_bytes - kept_bytes + 2 * largest_bytes -
                 ModelStateBytes(planned, options).total();
  int64_t numel = 0;
  for (const auto& [bytes, n] : numel_of) {
    const int64_t fits = std::min(n, std::max<int64_t>(room, 0) / bytes);
    numel += fits;
    room -= fits * bytes;
    if (fits < n) return std::max(numel, largest + second);
  }
  return std::numeric_limits<int64_t>::max();
}

absl::StatusOr<StageChoice> ChooseStage(absl::Span<const int64_t> bytes_at,
                                        int group_size, int64_t memory_bytes) {
  StageChoice choice;
  choice.stage = -1;
  std::string needs;
  for (size_t stage = 0; stage < bytes_at.size(); ++stage) {
    absl::StrAppend(&needs, stage == 0 ? "" : ", ", "stage ", stage, " ",
                    Mib(bytes_at[stage]));
    if (choice.stage < 0 && bytes_at[stage] <= memory_bytes) {
      choice.stage = static_cast<int>(stage);
    }
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
