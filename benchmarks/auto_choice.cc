// Compares what "auto" chooses with what measuring chooses. Each case leaves
// stage, micro-batch or recomputation to auto; then every way of training it is
// trained, in turns. Auto should have found the fastest of those whose measured
// peak fits.
//
//   auto_choice --world 2 --backend shm
//   auto_choice --world 2 --backend gloo
//
// It prints one line per case: what auto chose, the fastest way, and the median
// over rounds of the ratio of their times in a round. Choices whose ratio is at
// most 1.05 count as the same, since rounds of one way alone differ by more.
// The fastest of a dozen is also the luckiest, so where the ratio is larger the
// two are timed once more, in turns of their own, and these decide. --verbose
// adds a line for each way, with what was planned for it.
#include "engine/plan/auto_choice.h"

#include <torch/torch.h>

#include <algorithm>
#include <cstdio>
#include <string>
#include <utility>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/usage.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/time.h"
#include "base/monotonic.h"
#include "benchmarks/auto_cases.h"
#include "benchmarks/program.h"
#include "benchmarks/rank_program.h"
#include "comm/all_gather_values.h"
#include "config/config.h"
#include "engine/plan/rates.h"
#include "tessera/tessera.h"

ABSL_FLAG(std::string, backend, "shm", "shm or gloo: whose cases.");
ABSL_FLAG(int, rounds, 5, "Turns of each way.");
ABSL_FLAG(int, only, -1, "The number of a case, from 0; all by default.");
ABSL_FLAG(bool, verbose, false, "A line for each way of training.");

namespace tessera {
namespace {

constexpr double kSame = 1.05;
constexpr int kDuelRounds = 9;
constexpr int kWarmUp = 3;  // steps
constexpr double kTurnSeconds = 0.3;

struct Way {
  int stage = 0;
  int64_t micro_batch = 1;
  std::string policy;  // "": none
  bool operator==(const Way& other) const {
    return stage == other.stage && micro_batch == other.micro_batch &&
           policy == other.policy;
  }
  std::string ToString() const {
    return absl::StrCat("stage ", stage, ", micro-batch ", micro_batch, ", ",
                        policy.empty() ? "kept" : policy);
  }
};

proto::Config BaseOf(const Case& c, int world_size) {
  proto::Config config;
  config.set_train_batch_size(c.samples * world_size);
  config.set_gradient_clipping(0);
  config.mutable_optimizer()->set_type("AdamW");
  config.mutable_bf16()->set_enabled(c.bf16);
  return config;
}

proto::Config ConfigOf(const Case& c, const Way& way, int world_size) {
  proto::Config config = BaseOf(c, world_size);
  config.set_train_micro_batch_size_per_gpu(way.micro_batch);
  config.mutable_zero_optimization()->set_stage(way.stage);
  if (!way.policy.empty()) {
    config.mutable_activation_checkpointing()->add_units("auto");
    config.mutable_activation_checkpointing()->set_policy(way.policy);
  }
  return config;
}

struct Measured {
  std::vector<double> seconds;  // of a step, by round
  int64_t peak_bytes = 0;
  double median() const { return Median(seconds); }
};

absl::Status Step(const Model& model, const Way& way, const Case& c,
                  Engine* engine) {
  for (int64_t i = 0; i < c.samples / way.micro_batch; ++i) {
    TESSERA_RETURN_IF_ERROR(engine->Backward(model.loss(way.micro_batch)));
    TESSERA_RETURN_IF_ERROR(engine->Step());
  }
  return absl::OkStatus();
}

// Runs a turn: a new engine, its first steps, and then some timed steps. All
// ranks make as many steps as rank 0 finds time for.
absl::Status Turn(const Case& c, const Way& way, const World& world,
                  Measured* measured) {
  torch::manual_seed(0);
  const Model model = c.make();
  TESSERA_ASSIGN_OR_RETURN(
      const auto engine,
      Engine::Create(model.module, ConfigOf(c, way, world.world_size())));
  absl::Duration start;
  for (int i = 0; i < kWarmUp; ++i) {
    start = MonotonicNow();
    TESSERA_RETURN_IF_ERROR(Step(model, way, c, engine.get()));
  }
  const double one = absl::ToDoubleSeconds(MonotonicNow() - start);
  TESSERA_ASSIGN_OR_RETURN(const auto all,
                           AllGatherValue(world.communicator().get(),
                                          static_cast<int>(std::clamp(
                                              kTurnSeconds / one, 2.0, 100.0)),
                                          {"steps of a turn"}));
  const int steps = all[0];
  std::vector<double> seconds;
  for (int i = 0; i < steps; ++i) {
    start = MonotonicNow();
    TESSERA_RETURN_IF_ERROR(Step(model, way, c, engine.get()));
    seconds.push_back(absl::ToDoubleSeconds(MonotonicNow() - start));
    const StepMemoryReport& memory = engine->last_step().memory;
    // Plans do not count the staging of collectives.
    measured->peak_bytes = std::max(
        measured->peak_bytes,
        memory.peak_bytes - memory.at_peak.held[HeldKind::kCommunication]);
  }
  measured->seconds.push_back(Median(std::move(seconds)));
  return engine->Close();
}

std::vector<Way> WaysOf(const Case& c) {
  std::vector<Way> ways;
  for (int64_t m = c.samples; m >= 1; m /= 2) {
    for (const char* policy : {"", "selective", "full"}) {
      for (int stage = 0; stage <= 3; ++stage) {
        ways.push_back({stage, m, policy});
      }
    }
    if (!c.auto_micro_batch) break;
  }
  return ways;
}

absl::StatusOr<int64_t> MemoryOf(const Case& c, int world_size) {
  if (c.memory == 0) return int64_t{8} << 30;
  const Model model = c.make();
  PlanOptions options;
  options.world_size = world_size;
  TESSERA_ASSIGN_OR_RETURN(
      const PlanReport report,
      Plan(
          *model.module, [&] { return model.loss(c.samples); },
          ConfigOf(c, {0, c.samples, ""}, world_size), options));
  return static_cast<int64_t>(
      c.memory * static_cast<double>(report.stages[0].peak.total()));
}

proto::Config AutoConfigOf(const Case& c, int64_t memory_bytes,
                           int world_size) {
  proto::Config config = BaseOf(c, world_size);
  config.mutable_zero_optimization()->set_auto_stage(true);
  config.mutable_activation_checkpointing()->set_policy("auto");
  config.mutable_sharding()->set_memory_limit_bytes(memory_bytes);
  config.set_auto_micro_batch(c.auto_micro_batch);
  return config;
}

absl::StatusOr<std::pair<Way, std::string>> Choose(const Case& c,
                                                   int64_t memory_bytes,
                                                   int world_size) {
  torch::manual_seed(0);
  const Model model = c.make();
  EngineOptions options;
  options.planned_loss = model.loss;
  TESSERA_ASSIGN_OR_RETURN(
      const auto engine,
      Engine::Create(model.module, AutoConfigOf(c, memory_bytes, world_size),
                     options));
  const proto::Config& made = engine->config();
  Way way{engine->stage(), made.train_micro_batch_size_per_gpu(), ""};
  if (!made.activation_checkpointing().units().empty()) {
    way.policy = made.activation_checkpointing().policy();
  }
  std::string reason = engine->auto_reason();
  TESSERA_RETURN_IF_ERROR(engine->Close());
  return std::pair(way, reason);
}

// Returns what is planned for each way, as Create plans it.
absl::StatusOr<std::vector<AutoCandidate>> PlannedWays(const Case& c,
                                                       const World& world) {
  const Model model = c.make();
  PlanOptions options;
  options.world_size = world.world_size();
  options.memory_bytes = int64_t{1} << 40;
  options.shared_working_copy = c.backend == "shm";
  TESSERA_ASSIGN_OR_RETURN(options.rates,
                           MeasureRates(world.communicator().get()));
  TESSERA_ASSIGN_OR_RETURN(const proto::Config config,
                           ResolveConfig(AutoConfigOf(c, 0, world.world_size()),
                                         world.world_size()));
  TESSERA_ASSIGN_OR_RETURN(
      const AutoChoice choice,
      ChooseAuto(*model.module, model.loss, config, options));
  std::vector<AutoCandidate> planned = choice.others;
  planned.push_back(choice.chosen);
  return planned;
}

std::string PlannedText(const std::vector<AutoCandidate>& planned,
                        const Way& way) {
  for (const AutoCandidate& each : planned) {
    if (Way{each.stage, each.micro_batch, each.policy} == way) {
      return absl::StrFormat(
          "planned %8.2f ms (recompute %.2f, sent %.2f, update %.2f) "
          "%8.1f MiB",
          each.seconds.total() * 1e3, each.seconds.recompute * 1e3,
          each.seconds.communication * 1e3, each.seconds.update * 1e3,
          static_cast<double>(each.peak_bytes) / (1 << 20));
    }
  }
  return "not planned";
}

// Returns the median over rounds of a's time over b's.
double Ratio(const Measured& a, const Measured& b) {
  return Median(Ratios(a.seconds, b.seconds));
}

// Returns the ratio of two ways in turns of their own.
absl::StatusOr<double> Duel(const Case& c, const Way& a, const Way& b,
                            const World& world) {
  Measured of_a, of_b;
  for (int round = 0; round < kDuelRounds; ++round) {
    const bool first = round % 2 == 0;
    TESSERA_RETURN_IF_ERROR(
        Turn(c, first ? a : b, world, first ? &of_a : &of_b));
    TESSERA_RETURN_IF_ERROR(
        Turn(c, first ? b : a, world, first ? &of_b : &of_a));
  }
  return Ratio(of_a, of_b);
}

// Returns whether auto's choice is as fast as any.
absl::StatusOr<bool> RunCase(const Case& c, const World& world) {
  const bool first = world.rank() == 0;
  TESSERA_ASSIGN_OR_RETURN(const int64_t memory,
                           MemoryOf(c, world.world_size()));
  TESSERA_ASSIGN_OR_RETURN(const auto choice,
                           Choose(c, memory, world.world_size()));
  const std::vector<Way> ways = WaysOf(c);
  std::vector<Measured> measured(ways.size());
  for (int round = 0; round < absl::GetFlag(FLAGS_rounds); ++round) {
    for (size_t i = 0; i < ways.size(); ++i) {
      const size_t at = (i * 7 + static_cast<size_t>(round) * 5) % ways.size();
      TESSERA_RETURN_IF_ERROR(Turn(c, ways[at], world, &measured[at]));
    }
  }
  std::vector<AutoCandidate> planned;
  if (absl::GetFlag(FLAGS_verbose)) {
    TESSERA_ASSIGN_OR_RETURN(planned, PlannedWays(c, world));
  }
  const Measured* chosen = nullptr;
  size_t best = ways.size();
  for (size_t i = 0; i < ways.size(); ++i) {
    const bool fits = measured[i].peak_bytes <= memory;
    if (absl::GetFlag(FLAGS_verbose) && first) {
      absl::PrintF("  %-36s %8.2f ms %8.1f MiB %-9s %s\n", ways[i].ToString(),
                   measured[i].median() * 1e3,
                   static_cast<double>(measured[i].peak_bytes) / (1 << 20),
                   fits ? "" : "too large", PlannedText(planned, ways[i]));
    }
    if (ways[i] == choice.first) chosen = &measured[i];
    if (!fits) continue;
    if (best == ways.size() || measured[i].median() < measured[best].median()) {
      best = i;
    }
  }
  if (chosen == nullptr || best == ways.size()) {
    return absl::InternalError(absl::StrCat(c.name, ": nothing to compare"));
  }
  double ratio = Ratio(*chosen, measured[best]);
  // Ranks have their own clocks: rank 0's decides.
  TESSERA_ASSIGN_OR_RETURN(
      const auto duel,
      AllGatherValue(world.communicator().get(),
                     ratio > kSame ? best : ways.size(), {"a duel"}));
  if (duel[0] < ways.size()) {
    best = duel[0];
    TESSERA_ASSIGN_OR_RETURN(ratio, Duel(c, choice.first, ways[best], world));
  }
  const bool good = ratio <= kSame && chosen->peak_bytes <= memory;
  if (first) {
    absl::PrintF(
        "%s, %s, %.1f MiB: auto %s (%.2f ms, %.1f MiB); fastest %s (%.2f ms); "
        "ratio %.3f %s\n",
        c.name, c.backend, static_cast<double>(memory) / (1 << 20),
        choice.first.ToString(), chosen->median() * 1e3,
        static_cast<double>(chosen->peak_bytes) / (1 << 20),
        ways[best].ToString(), measured[best].median() * 1e3, ratio,
        good ? "same" : "NOT THE SAME");
    if (absl::GetFlag(FLAGS_verbose)) {
      absl::PrintF("  %s\n", choice.second);
    }
    std::fflush(stdout);
  }
  return good;
}

absl::Status Run(int argc, char** argv) {
  absl::SetProgramUsageMessage("measures what auto chooses; see --helpfull");
  TESSERA_RETURN_IF_ERROR(ReadRankFlags(argc, argv));
  WorldOptions options;
  options.backend = absl::GetFlag(FLAGS_backend);
  TESSERA_ASSIGN_OR_RETURN(const World* world, Init(&argc, argv, options));
  int good = 0, all = 0;
  const std::vector<Case> cases = Cases();
  for (size_t i = 0; i < cases.size(); ++i) {
    const int only = absl::GetFlag(FLAGS_only);
    if (only >= 0 && static_cast<size_t>(only) != i) continue;
    if (cases[i].backend != options.backend) continue;
    TESSERA_ASSIGN_OR_RETURN(const bool same, RunCase(cases[i], *world));
    ++all;
    good += same ? 1 : 0;
  }
  if (world->rank() == 0) absl::PrintF("%d of %d\n", good, all);
  return absl::OkStatus();
}

}  // namespace
}  // namespace tessera

int main(int argc, char** argv) {
  return tessera::RunRank("auto_choice", argc, argv, tessera::Run);
}
