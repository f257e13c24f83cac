#include "engine/plan/auto_choice.h"

#include <algorithm>
#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/status.h"
#include "base/step_memory/held_memory.h"
#include "engine/plan/model_trace.h"
#include "engine/plan/stage_plan.h"

namespace tessera {
namespace {

constexpr double kSame = 1.02;  // times closer than this count as equal
constexpr size_t kMostMicroBatches = 8;
constexpr size_t kShown = 3;

// All divisors where there are few, else those nearest to halves of each other.
std::vector<int64_t> MicroBatches(const proto::Config& config) {
  const int64_t most = config.train_micro_batch_size_per_gpu();
  if (!config.auto_micro_batch()) return {most};
  const int64_t samples = most * config.gradient_accumulation_steps();
  std::vector<int64_t> divisors;
  for (int64_t d = 1; d * d <= samples; ++d) {
    if (samples % d != 0) continue;
    divisors.push_back(d);
    if (d * d < samples) divisors.push_back(samples / d);
  }
  std::sort(divisors.rbegin(), divisors.rend());
  std::vector<int64_t> some;
  for (const int64_t d : divisors) {
    const bool few = divisors.size() <= kMostMicroBatches;
    if (few || some.empty() || 2 * d <= some.back()) some.push_back(d);
    if (some.size() == kMostMicroBatches) break;
  }
  return some;
}

std::vector<int> Stages(const proto::Config& config) {
  if (!config.zero_optimization().auto_stage()) {
    return {config.zero_optimization().stage()};
  }
  return {0, 1, 2, 3};
}

// "" is none. `recomputes`: some modules are named.
std::vector<std::string> Policies(const proto::Config& config,
                                  bool recomputes) {
  const std::string& policy = config.activation_checkpointing().policy();
  if (!recomputes) return {""};
  if (policy == "auto") return {"", "selective", "full"};
  return {policy};
}

proto::Config ConfigOf(const proto::Config& config, const AutoCandidate& way) {
  proto::Config made = config;
  made.set_train_micro_batch_size_per_gpu(way.micro_batch);
  made.set_gradient_accumulation_steps(way.micro_batches);
  made.set_auto_micro_batch(false);
  made.mutable_zero_optimization()->set_stage(way.stage);
  proto::ActivationCheckpointing* const recompute =
      made.mutable_activation_checkpointing();
  if (recompute->policy() == "auto") {
    if (way.policy.empty()) recompute->clear_units();
    recompute->set_policy(way.policy.empty() ? "full" : way.policy);
  }
  return made;
}

// Modules that a predicate means are not computed again either.
PlanOptions OptionsOf(PlanOptions options, const AutoCandidate& way) {
  if (way.policy.empty()) options.is_recomputed = nullptr;
  return options;
}

absl::StatusOr<std::vector<AutoCandidate>> PlanAll(
    const torch::nn::Module& module, const SampledLoss& loss,
    const proto::Config& config, const PlanOptions& options) {
  std::vector<AutoCandidate> candidates;
  const int64_t samples = config.train_micro_batch_size_per_gpu() *
                          config.gradient_accumulation_steps();
  for (const int64_t micro_batch : MicroBatches(config)) {
    TESSERA_ASSIGN_OR_RETURN(
        const ModelTrace model,
        TraceModel(
            module, [&] { return loss(micro_batch); },
            PlanSettings(config, options), options.tracer));
    const bool recomputes =
        std::any_of(model.recomputed.begin(), model.recomputed.end(),
                    [](int module) { return module >= 0; });
    for (const std::string& policy : Policies(config, recomputes)) {
      for (const int stage : Stages(config)) {
        AutoCandidate way{stage, micro_batch, samples / micro_batch, policy};
        const PlanOptions of_way = OptionsOf(options, way);
        const proto::Config made = ConfigOf(config, way);
        TESSERA_ASSIGN_OR_RETURN(
            const StagePlan plan,
            PlanStage(
                model, stage,
                policy.empty() ? Recomputed::kNone : Recomputed::kConfigured,
                made, PlanSettings(made, of_way), of_way));
        way.peak_bytes = plan.peak.total();
        way.seconds = plan.seconds;
        candidates.push_back(std::move(way));
      }
    }
  }
  return candidates;
}

// What is simpler, at the same speed.
std::tuple<int, int, int64_t> Simplicity(const AutoCandidate& way) {
  const int recompute = way.policy.empty() ? 0 : way.policy == "full" ? 2 : 1;
  return {recompute, way.stage, -way.micro_batch};
}

std::string TextOf(const AutoCandidate& way) {
  return absl::StrCat(
      "stage ", way.stage, way.stage == 0 ? " (plain replication, DDP)" : "",
      ", micro-batch ", way.micro_batch, " x ", way.micro_batches,
      way.policy.empty()
          ? ", activations kept"
          : absl::StrCat(", activations recomputed (", way.policy, ")"));
}

std::string FiguresOf(const AutoCandidate& way) {
  const double seconds = way.seconds.total();
  return absl::StrCat(
      seconds > 0 ? absl::StrFormat("%.3g ms a step and ", seconds * 1e3) : "",
      BytesText(way.peak_bytes));
}

// REQUIRES: sorted by time.
std::string ReasonOf(const std::vector<AutoCandidate>& ways, size_t chosen,
                     int64_t memory_bytes) {
  std::string reason =
      absl::StrCat(TextOf(ways[chosen]), ": planned ", FiguresOf(ways[chosen]),
                   " of ", BytesText(memory_bytes), "; the fastest of ",
                   ways.size(), " ways that ", "fits");
  size_t shown = 0, too_large = 0;
  std::string others, refused;
  for (size_t i = 0; i < ways.size(); ++i) {
    if (i == chosen) continue;
    const bool fits = ways[i].peak_bytes <= memory_bytes;
    if (!fits) {
      if (++too_large == 1) {
        refused = absl::StrCat(TextOf(ways[i]), " needs ",
                               BytesText(ways[i].peak_bytes));
      }
    } else if (shown < kShown) {
      ++shown;
      absl::StrAppend(&others, others.empty() ? "" : "; ", TextOf(ways[i]), " ",
                      FiguresOf(ways[i]));
    }
  }
  if (!others.empty()) absl::StrAppend(&reason, "; others: ", others);
  if (too_large > 0) {
    absl::StrAppend(&reason, "; ", too_large, " do not fit, the fastest of ",
                    "these: ", refused);
  }
  return reason;
}

absl::Status NothingFits(const std::vector<AutoCandidate>& ways,
                         int64_t memory_bytes) {
  const auto least = std::min_element(
      ways.begin(), ways.end(),
      [](const auto& a, const auto& b) { return a.peak_bytes < b.peak_bytes; });
  return absl::ResourceExhaustedError(absl::StrCat(
      "auto: none of ", ways.size(), " ways of training fits into ",
      BytesText(memory_bytes), " of a rank; the least, ", TextOf(*least),
      ", needs ", BytesText(least->peak_bytes),
      ": use more ranks, a 16-bit dtype, smaller micro-batches or a higher "
      "sharding.memory_limit_bytes"));
}

}  // namespace

bool LeavesToAuto(const proto::Config& config) {
  return config.zero_optimization().auto_stage() || config.auto_micro_batch() ||
         config.activation_checkpointing().policy() == "auto";
}

absl::StatusOr<AutoChoice> ChooseAuto(const torch::nn::Module& module,
                                      const SampledLoss& loss,
                                      const proto::Config& config,
                                      const PlanOptions& options) {
  TESSERA_ASSIGN_OR_RETURN(const int64_t memory_bytes,
                           MemoryOfRank(config, options));
  TESSERA_ASSIGN_OR_RETURN(std::vector<AutoCandidate> ways,
                           PlanAll(module, loss, config, options));
  std::stable_sort(ways.begin(), ways.end(), [](const auto& a, const auto& b) {
    return a.seconds.total() < b.seconds.total();
  });
  size_t chosen = ways.size();
  double fastest = 0;
  for (size_t i = 0; i < ways.size(); ++i) {
    if (ways[i].peak_bytes > memory_bytes) continue;
    const double seconds = ways[i].seconds.total();
    if (chosen == ways.size()) fastest = seconds;
    if (chosen == ways.size() ||
        (seconds <= fastest * kSame &&
         Simplicity(ways[i]) < Simplicity(ways[chosen]))) {
      chosen = i;
    }
  }
  if (chosen == ways.size()) return NothingFits(ways, memory_bytes);
  AutoChoice choice;
  choice.reason = ReasonOf(ways, chosen, memory_bytes);
  choice.chosen = ways[chosen];
  choice.config = ConfigOf(config, choice.chosen);
  ways.erase(ways.begin() + static_cast<int64_t>(chosen));
  choice.others = std::move(ways);
  return choice;
}

}  // namespace tessera
