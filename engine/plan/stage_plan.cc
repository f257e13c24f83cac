#include "engine/plan/stage_plan.h"

#include <algorithm>
#include <utility>

#include "base/status.h"
#include "config/config.pb.h"
#include "engine/build/group_choice.h"
#include "engine/build/rank_memory.h"
#include "engine/plan/replay/planned_flat.h"
#include "engine/plan/replay/step_replay.h"

namespace tessera {
namespace {

PlanMoment MomentOf(const Trace& trace, int64_t event) {
  PlanMoment moment;
  const TraceEvent& at = trace.events[static_cast<size_t>(event)];
  moment.backward = at.backward;
  if (at.unit >= 0) {
    const std::string& name =
        trace.parameters[static_cast<size_t>(at.unit)].name;
    moment.module = name.substr(0, std::min(name.rfind('.'), name.size()));
  }
  // Results are allocated before their operator's event.
  for (auto i = static_cast<size_t>(event); i < trace.events.size(); ++i) {
    if (trace.events[i].kind != TraceEvent::Kind::kOperator) continue;
    moment.op = trace.operators[static_cast<size_t>(trace.events[i].what)];
    break;
  }
  return moment;
}

// What a ring sends of `bytes`, once around.
int64_t Around(int64_t bytes, int ranks) { return bytes / ranks * (ranks - 1); }

// An all-reduce goes around twice, a reduce-scatter and a gather once. Of shard
// groups of `ranks` the sums of their shards go over the replicas.
int64_t SentBytes(const StepReplayResult& result, int64_t published_bytes,
                  int ranks, int world_size, bool all_reduces) {
  return Around(result.gathered_bytes + published_bytes, ranks) +
         Around(result.reduced_bytes, ranks) * (all_reduces ? 2 : 1) +
         Around(result.reduced_bytes / ranks, world_size / ranks) * 2;
}

struct Published {
  int64_t times = 0, bytes = 0;
};

// What only its owner has updated.
Published PublishedOf(const std::vector<PlannedFlat>& flats) {
  Published published;
  for (const PlannedFlat& flat : flats) {
    if (!flat.trained || !flat.sharded_optimizer || flat.sharded_parameters) {
      continue;
    }
    ++published.times;
    published.bytes += flat.whole_numel * flat.working_bytes;
  }
  return published;
}

// All-reduced for states with shapes of their own: three float64 each
// (optim/factored/adafactor.h).
int64_t LineBytes(const std::vector<PlannedFlat>& flats) {
  int64_t lines = 0;
  for (const PlannedFlat& flat : flats) {
    if (!flat.trained || !flat.sharded_optimizer) continue;
    lines += flat.shaped_state_bytes / flat.state_bytes;
  }
  return 3 * 8 * lines;
}

// A step reads the gradient, reads and writes the master and the states, and
// writes what the working copy has of its own: nothing beside remainders.
int64_t UpdateBytes(const std::vector<PlannedFlat>& flats) {
  int64_t bytes = 0;
  for (const PlannedFlat& flat : flats) {
    if (!flat.trained) continue;
    bytes +=
        flat.owned_numel() *
            (flat.gradient_bytes + 2 * flat.stepped_bytes +
             (flat.master_bytes > 0 && !flat.splits_masters ? flat.working_bytes
                                                            : 0)) +
        2 * flat.owned_numel() / 64 * flat.optimizer_block_bytes;
  }
  return bytes;
}

// Returns the disk traffic of one flat in a step, except for what gathers read:
// its update, and its gradients on the way to the disk.
OffloadTraffic UpdateTraffic(const PlannedFlat& flat, const Settings& settings,
                             int64_t reductions) {
  const bool states = flat.states == Tier::kDisk;
  const bool parameters = flat.parameters == Tier::kDisk;
  const bool separate = flat.master_bytes > 0;
  const int64_t master_bytes = flat.owned_numel() * flat.stepped_bytes;
  OffloadTraffic traffic;
  if (!flat.trained || !settings.optimizer.has_value()) return traffic;
  traffic.read = (separate ? states : parameters) ? master_bytes : 0;
  if (states) {
    traffic.read += flat.owned_numel() / 64 * flat.optimizer_block_bytes;
  }
  traffic.written = traffic.read;
  if (separate && parameters) {
    traffic.written += flat.owned_numel() * flat.working_bytes;
  }
  if (flat.gradients == Tier::kDisk) {
    const bool normed = settings.step.max_norm > 0 ||
                        settings.step.report_norm ||
                        settings.step.skip_on_overflow;
    const int64_t bytes = flat.owned_numel() * flat.gradient_bytes;
    traffic.written += reductions * bytes;
    traffic.read += (reductions - 1 + (normed ? 2 : 1)) * bytes;
  }
  return traffic;
}

// `gathered`: of the flats' parameters, whole, in a step.
OffloadTraffic DiskTraffic(const PlannedFlats& planned,
                           const Settings& settings,
                           const StepReplayOptions& replay, int64_t gathered) {
  OffloadTraffic traffic;
  const int64_t reductions =
      replay.accumulates_locally ? 1 : replay.micro_batches;
  for (const PlannedFlat& flat : planned.flats) {
    const OffloadTraffic each = UpdateTraffic(flat, settings, reductions);
    traffic.read += each.read;
    traffic.written += each.written;
  }
  const TierChoice& choice = planned.tiers;
  if (choice.parameters.units > 0 && choice.on_disk) {
    // Where the shard group is one rank, only these units are gathered.
    const double part = settings.shard_group_size == 1
                            ? 1
                            : static_cast<double>(choice.parameters.numel) /
                                  static_cast<double>(choice.total_numel);
    traffic.read += static_cast<int64_t>(
        static_cast<double>(gathered / settings.shard_group_size) * part);
  }
  return traffic;
}

StepSeconds SecondsOf(const ModelTrace& model, const Settings& settings,
                      const Recomputation& recomputation,
                      const StepTraffic& traffic, const OffloadTraffic& disk,
                      int64_t micro_batches, int64_t update_bytes,
                      const Rates& rates) {
  const bool half = settings.autocast_dtype.has_value() ||
                    (settings.param_dtype.has_value() &&
                     at::isReducedFloatingType(*settings.param_dtype));
  const auto times = static_cast<double>(micro_batches);
  StepSeconds seconds;
  seconds.compute = times * ComputeSeconds(model.trace, rates, half);
  seconds.recompute = times * RecomputeSeconds(recomputation, rates, half);
  seconds.communication = CommunicationSeconds(traffic, seconds.compute, rates);
  seconds.update = static_cast<double>(update_bytes) / rates.bytes_per_second;
  seconds.offload = OffloadSeconds(disk, seconds.total(), rates);
  return seconds;
}

RecomputationOptions RecomputationOf(const ModelTrace& model,
                                     Recomputed recomputed,
                                     const Settings& settings, bool on_cpu) {
  RecomputationOptions options;
  options.keeps = settings.recompute.keeps;
  options.budget_bytes = settings.recompute.budget_bytes;
  options.recomputes = settings.recompute.recomputes;
  if (settings.activations.tier == (on_cpu ? Tier::kDisk : Tier::kHost)) {
    options.moves_from = settings.activations.least_bytes;
  }
  if (recomputed == Recomputed::kAutomatic) {
    options.module_of = model.automatic;
  } else if (recomputed == Recomputed::kConfigured && model.recomputes) {
    options.module_of = model.recomputed;
  }
  return options;
}

// Returns the collectives of a step of several ranks. `ranks`: of those among
// which flats are cut.
StepTraffic TrafficOf(const StepReplayResult& result,
                      const Published& published, int stage, int ranks,
                      int world_size) {
  StepTraffic traffic;
  traffic.gathers = result.gathers;
  traffic.gathered_bytes = result.gathered_bytes;
  traffic.reductions = result.reductions;
  traffic.reduced_bytes = result.reduced_bytes;
  traffic.all_reduces = stage == 0;
  traffic.publications = published.times;
  traffic.published_bytes = published.bytes;
  if (ranks < world_size) {
    traffic.replica_sums = result.reductions;
    traffic.replica_bytes = result.reduced_bytes / ranks;
  }
  return traffic;
}

}  // namespace

absl::StatusOr<StagePlan> PlanStage(const ModelTrace& model, int stage,
                                    Recomputed recomputed,
                                    const proto::Config& config,
                                    Settings settings,
                                    const PlanOptions& options) {
  SetOverlap(config.zero_optimization(), stage, &settings);
  settings.flats.sharded_parameters = stage == 3;
  if (settings.muon.has_value()) settings.flats.part = PartsOf(model.groups);
  TESSERA_ASSIGN_OR_RETURN(
      const std::vector<FlatPlan> flats,
      SplitFlats(model.partition.units, model.trainable, settings.flats));
  const PlannedFlats planned =
      PlannedFlatsOf(settings, model.groups, flats, stage, options.on_cpu);
  const std::vector<int> flat_of = PlacesIn(flats, model.trace);
  const std::string& shared = config.sharding().shared_working_copy();
  StepReplayOptions replay;
  replay.schedule = settings.schedule;
  replay.gradients = settings.gradients;
  replay.world_size = options.world_size;
  replay.micro_batches = config.gradient_accumulation_steps();
  replay.accumulates_locally = config.sharding().accumulation() == "local";
  replay.has_optimizer = settings.optimizer.has_value();
  replay.stream_bytes = planned.stream_bytes;
  replay.shares_working_copy = stage == 3 && options.world_size > 1 &&
                               planned.tiers.parameters.units == 0 &&
                               shared != "off" &&
                               (options.shared_working_copy || shared == "on");
  replay.buffer_bytes = model.buffer_bytes;
  replay.recomputed =
      RecomputationOf(model, recomputed, settings, options.on_cpu);
  const StepReplayResult result =
      ReplayStep(model.trace, planned.flats, flat_of, replay);
  StagePlan plan;
  plan.stage = stage;
  plan.between_steps = result.between_steps;
  plan.peak = result.peak;
  plan.at = MomentOf(model.trace, result.peak_event);
  // What is shared is written where all read it.
  const Published published =
      replay.shares_working_copy ? Published() : PublishedOf(planned.flats);
  const int ranks = settings.group_size(stage);
  plan.sent_bytes = SentBytes(result, published.bytes, ranks,
                              options.world_size, /*all_reduces=*/stage == 0) +
                    Around(LineBytes(planned.flats), ranks) * 2;
  plan.units = static_cast<int64_t>(planned.flats.size());
  plan.disk = DiskTraffic(planned, settings, replay, result.gathered_bytes);
  if (options.on_cpu) {
    const int64_t moved =
        result.recomputation.moved_bytes * replay.micro_batches;
    plan.disk.read += moved;
    plan.disk.written += moved;
  }
  if (!options.rates.has_value()) return plan;
  StepTraffic traffic;
  if (options.world_size > 1) {
    traffic = TrafficOf(result, published, stage, ranks, options.world_size);
    traffic.overlaps = settings.gradients.overlap;
  }
  plan.seconds = SecondsOf(
      model, settings, result.recomputation, traffic, plan.disk,
      replay.micro_batches,
      replay.has_optimizer ? UpdateBytes(planned.flats) : 0, *options.rates);
  return plan;
}

// As stage "auto" has it: nine tenths of what is there, which ranks of one host
// share.
absl::StatusOr<int64_t> MemoryOfRank(const proto::Config& config,
                                     const PlanOptions& options) {
  if (options.memory_bytes > 0) return options.memory_bytes;
  if (config.sharding().memory_limit_bytes() > 0) {
    return config.sharding().memory_limit_bytes();
  }
  return RankMemory(at::kCPU,
                    options.shared_working_copy ? options.world_size : 1);
}

Settings PlanSettings(const proto::Config& config, const PlanOptions& options) {
  EngineOptions engine;
  engine.is_unit = options.is_unit;
  engine.is_leaf = options.is_leaf;
  engine.is_recomputed = options.is_recomputed;
  engine.optimizer = options.optimizer;
  Settings settings = SettingsOf(config, engine, options.world_size);
  settings.flats.working_dtype = [settings](const NamedParameter& p) {
    return WorkingDtype(settings, p);
  };
  return settings;
}

}  // namespace tessera
