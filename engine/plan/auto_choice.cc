#include "engine/plan/auto_choice.h"

#include <algorithm>
#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/status.h"
#include "base/step_memory/held_memory.h"
#include "config/config.h"
#include "engine/plan/model_trace.h"
#include "engine/plan/stage_plan.h"

namespace tessera {
namespace {

constexpr double kSame = 1.02;  // times closer than this count as equal
constexpr size_t kMostMicroBatches = 8;
constexpr size_t kShown = 3;

// All divisors where there are few, else some from the largest to 1.
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
  if (divisors.size() <= kMostMicroBatches) return divisors;
  std::vector<int64_t> some;
  for (size_t i = 0; i < kMostMicroBatches; ++i) {
    some.push_back(
        divisors[i * (divisors.size() - 1) / (kMostMicroBatches - 1)]);
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

absl::StatusOr<proto::Config> ConfigOf(const proto::Config& config,
                                       const AutoCandidate& way,
                                       int world_size) {
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
  return ResolveConfig(made, world_size);
}

// Modules that a predicate means are not computed again either.
PlanOptions OptionsOf(PlanOptions options, const AutoCandidate& way) {
  if (way.policy.empty()) options.is_recomputed = nullptr;
  return options;
}

// Those of one micro-batch.
absl::Status PlanMicroBatch(const ModelTrace& model,
                            const proto::Config& config,
                            const PlanOptions& options, int64_t micro_batch,
                            std::vector<AutoCandidate>* candidates) {
  const int64_t samples = config.train_micro_batch_size_per_gpu() *
                          config.gradient_accumulation_steps();
  const bool recomputes =
      std::any_of(model.recomputed.begin(), model.recomputed.end(),
                  [](int module) { return module >= 0; });
  for (const std::string& policy : Policies(config, recomputes)) {
    for (const int stage : Stages(config)) {
      AutoCandidate way{stage, micro_batch, samples / micro_batch, policy};
      const PlanOptions of_way = OptionsOf(options, way);
      TESSERA_ASSIGN_OR_RETURN(const proto::Config made,
                               ConfigOf(config, way, options.world_size));
      TESSERA_ASSIGN_OR_RETURN(
          const StagePlan plan,
          PlanStage(
              model, stage,
              policy.empty() ? Recomputed::kNone : Recomputed::kConfigured,
              made, PlanSettings(made, of_way), of_way));
      way.peak_bytes = plan.peak.total();
      way.seconds = plan.seconds;
      candidates->push_back(std::move(way));
    }
  }
  return absl::OkStatus();
}

// A micro-batch that the model refuses (batch norm wants two samples) is none;
// `skipped` has those, and why the first.
absl::StatusOr<std::vector<AutoCandidate>> PlanAll(
    const torch::nn::Module& module, const SampledLoss& loss,
    const proto::Config& config, const PlanOptions& options,
    std::string* skipped) {
  std::vector<AutoCandidate> candidates;
  absl::Status refused;
  for (const int64_t micro_batch : MicroBatches(config)) {
    const absl::StatusOr<ModelTrace> model = TraceModel(
        module, [&] { return loss(micro_batch); },
        PlanSettings(config, options), options.tracer);
    if (!model.ok()) {
      absl::StrAppend(skipped, refused.ok() ? "" : ", ", micro_batch);
      refused.Update(model.status());
      continue;
    }
    TESSERA_RETURN_IF_ERROR(
        PlanMicroBatch(*model, config, options, micro_batch, &candidates));
  }
  if (candidates.empty()) return refused;
  if (!refused.ok()) {
    absl::StrAppend(skipped, " (", refused.message(), ")");
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
  std::string reason = absl::StrCat(
      TextOf(ways[chosen]), ": planned ", FiguresOf(ways[chosen]), " of ",
      BytesText(memory_bytes), "; of ", ways.size(), " ways ",
      ways[chosen].seconds.total() > 0
          ? "none that fits is simpler, or more than 2 % faster"
          : "the simplest that fits");
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
  std::string skipped;
  TESSERA_ASSIGN_OR_RETURN(std::vector<AutoCandidate> ways,
                           PlanAll(module, loss, config, options, &skipped));
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
  if (!skipped.empty()) {
    absl::StrAppend(&choice.reason, "; not of micro-batches of ", skipped);
  }
  choice.chosen = ways[chosen];
  TESSERA_ASSIGN_OR_RETURN(choice.config,
                           ConfigOf(config, choice.chosen, options.world_size));
  ways.erase(ways.begin() + static_cast<int64_t>(chosen));
  choice.others = std::move(ways);
  return choice;
}

absl::StatusOr<std::string> PlanText(const torch::nn::Module& module,
                                     const SampledLoss& loss,
                                     const proto::Config& config,
                                     const PlanOptions& options) {
  TESSERA_ASSIGN_OR_RETURN(proto::Config decided,
                           ResolveConfig(config, options.world_size));
  std::string text;
  PlanOptions of_choice = options;
  if (LeavesToAuto(decided)) {
    TESSERA_ASSIGN_OR_RETURN(const AutoChoice choice,
                             ChooseAuto(module, loss, decided, options));
    text = absl::StrCat("auto: ", choice.reason, "\n\n");
    decided = choice.config;
    of_choice = OptionsOf(options, choice.chosen);
  }
  const int64_t samples = decided.train_micro_batch_size_per_gpu();
  TESSERA_ASSIGN_OR_RETURN(
      const PlanReport report,
      Plan(
          module, [&] { return loss(samples); }, decided, of_choice));
  return absl::StrCat(text, report.ToString());
}

}  // namespace tessera
