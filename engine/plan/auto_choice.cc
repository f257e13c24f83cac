#include "engine/plan/auto_choice.h"

#include <algorithm>
#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/json.h"
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

// From nothing on, each with more elsewhere than the one before.
std::vector<AutoTiers> TiersOf(const proto::Config& config, int stage,
                               bool on_cpu) {
  const proto::ZeroOptimization& zero = config.zero_optimization();
  const bool states = zero.offload_optimizer().device() == "auto";
  const bool parameters = zero.offload_param().device() == "auto";
  std::vector<AutoTiers> tiers;
  const auto add = [&](const char* of_states, double ratio,
                       const char* of_parameters) {
    AutoTiers next;
    if (states) next.states = of_states;
    if (states) next.ratio = ratio;
    if (parameters) next.parameters = of_parameters;
    next.level = static_cast<int>(tiers.size());
    const bool same = !tiers.empty() && tiers.back().states == next.states &&
                      tiers.back().ratio == next.ratio &&
                      tiers.back().parameters == next.parameters;
    if (!same) tiers.push_back(next);
  };
  const double all = zero.offload_optimizer().ratio();
  add("none", all, "none");
  if (!states && !parameters) return tiers;
  const auto add_tier = [&](const char* tier, bool with_parameters) {
    if (stage == 3 && all == 1) add(tier, 0.5, "none");
    add(tier, all, "none");
    if (stage == 3 && with_parameters) add(tier, all, tier);
  };
  if (!on_cpu && stage > 0) add_tier("cpu", true);
  // And not only for activations.
  const bool disk = stage == 3 && DiskOf(config).has_value() &&
                    (!zero.offload_optimizer().nvme_path().empty() ||
                     !zero.offload_param().nvme_path().empty());
  if (disk && on_cpu) {
    add_tier("nvme", true);
  } else if (disk) {
    add("nvme", all, "cpu");
  }
  return tiers;
}

void SetTiers(const AutoTiers& tiers, proto::ZeroOptimization* zero) {
  if (!tiers.states.empty()) {
    proto::OffloadOptimizer* const states = zero->mutable_offload_optimizer();
    states->set_device(tiers.states);
    states->set_ratio(tiers.ratio);
    if (states->nvme_path().empty()) {
      states->set_nvme_path(zero->offload_param().nvme_path());
    }
  }
  if (tiers.parameters.empty()) return;
  proto::OffloadParam* const parameters = zero->mutable_offload_param();
  parameters->set_device(tiers.parameters);
  parameters->set_max_in_cpu(tiers.max_in_cpu);
  if (parameters->nvme_path().empty()) {
    parameters->set_nvme_path(zero->offload_optimizer().nvme_path());
  }
}

// Modules that a predicate means are not computed again either.
PlanOptions OptionsOf(PlanOptions options, const AutoCandidate& way) {
  if (way.policy.empty()) options.is_recomputed = nullptr;
  return options;
}

// Its plan is one of the candidates.
absl::Status PlanWay(const ModelTrace& model, const proto::Config& config,
                     const PlanOptions& options, AutoCandidate way,
                     std::vector<AutoCandidate>* candidates) {
  const PlanOptions of_way = OptionsOf(options, way);
  TESSERA_ASSIGN_OR_RETURN(const proto::Config made,
                           ConfigOfWay(config, way, options.world_size));
  TESSERA_ASSIGN_OR_RETURN(
      const StagePlan plan,
      PlanStage(
          model, way.stage,
          way.policy.empty() ? Recomputed::kNone : Recomputed::kConfigured,
          made, PlanSettings(made, of_way), of_way));
  way.peak_bytes = plan.peak.total();
  way.seconds = plan.seconds;
  candidates->push_back(std::move(way));
  return absl::OkStatus();
}

// Plans the candidates of one micro-batch size.
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
      for (const AutoTiers& tiers : TiersOf(config, stage, options.on_cpu)) {
        TESSERA_RETURN_IF_ERROR(
            PlanWay(model, config, options,
                    {stage, micro_batch, samples / micro_batch, policy, tiers},
                    candidates));
      }
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
        module, [&] { return loss(micro_batch); }, config.optimizer(),
        PlanSettings(config, options), options);
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
std::tuple<int, int, int, int64_t> Simplicity(const AutoCandidate& way) {
  const int recompute = way.policy.empty() ? 0 : way.policy == "full" ? 2 : 1;
  return {way.tiers.level, recompute, way.stage, -way.micro_batch};
}

std::string TextOf(const AutoTiers& tiers) {
  const bool states = !tiers.states.empty() && tiers.states != "none";
  const bool parameters =
      !tiers.parameters.empty() && tiers.parameters != "none";
  return absl::StrCat(
      states ? absl::StrCat(
                   ", ",
                   tiers.ratio < 1 ? absl::StrCat(tiers.ratio, " of the ") : "",
                   "states to ", tiers.states)
             : "",
      parameters ? absl::StrCat(", parameters to ", tiers.parameters) : "");
}

std::string TextOf(const AutoCandidate& way) {
  return absl::StrCat(
      "stage ", way.stage, way.stage == 0 ? " (plain replication, DDP)" : "",
      ", micro-batch ", way.micro_batch, " x ", way.micro_batches,
      way.policy.empty()
          ? ", activations kept"
          : absl::StrCat(", activations recomputed (", way.policy, ")"),
      TextOf(way.tiers));
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
         KeyThatPlansDecide(config) != nullptr;
}

const char* KeyThatPlansDecide(const proto::Config& config) {
  const proto::ZeroOptimization& zero = config.zero_optimization();
  if (config.activation_checkpointing().policy() == "auto") {
    return "activation_checkpointing.policy";
  }
  if (zero.offload_optimizer().device() == "auto") {
    return "zero_optimization.offload_optimizer.device";
  }
  return zero.offload_param().device() == "auto"
             ? "zero_optimization.offload_param.device"
             : nullptr;
}

absl::StatusOr<proto::Config> ConfigOfWay(const proto::Config& config,
                                          const AutoCandidate& way,
                                          int world_size) {
  proto::Config made = config;
  made.set_train_micro_batch_size_per_gpu(way.micro_batch);
  made.set_gradient_accumulation_steps(way.micro_batches);
  made.set_auto_micro_batch(false);
  made.mutable_zero_optimization()->set_stage(way.stage);
  SetTiers(way.tiers, made.mutable_zero_optimization());
  proto::ActivationCheckpointing* const recompute =
      made.mutable_activation_checkpointing();
  if (recompute->policy() == "auto") {
    if (way.policy.empty()) recompute->clear_units();
    recompute->set_policy(way.policy.empty() ? "full" : way.policy);
  }
  return ResolveConfig(made, world_size);
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
  TESSERA_ASSIGN_OR_RETURN(
      choice.config, ConfigOfWay(config, choice.chosen, options.world_size));
  ways.erase(ways.begin() + static_cast<int64_t>(chosen));
  choice.others = std::move(ways);
  return choice;
}

absl::StatusOr<std::string> PlanText(const torch::nn::Module& module,
                                     const SampledLoss& loss,
                                     const proto::Config& config,
                                     const PlanOptions& options, bool json) {
  TESSERA_ASSIGN_OR_RETURN(proto::Config decided,
                           ResolveConfig(config, options.world_size));
  std::string reason;
  PlanOptions of_choice = options;
  if (LeavesToAuto(decided)) {
    TESSERA_ASSIGN_OR_RETURN(const AutoChoice choice,
                             ChooseAuto(module, loss, decided, options));
    reason = choice.reason;
    decided = choice.config;
    of_choice = OptionsOf(options, choice.chosen);
  }
  const int64_t samples = decided.train_micro_batch_size_per_gpu();
  TESSERA_ASSIGN_OR_RETURN(
      const PlanReport report,
      Plan(
          module, [&] { return loss(samples); }, decided, of_choice));
  if (json) {
    return absl::StrCat(
        "{\"auto\": ", reason.empty() ? "null" : QuoteJson(reason),
        ",\n\"plan\": ", report.ToJson(), "}\n");
  }
  return absl::StrCat(
      reason.empty() ? "" : absl::StrCat("auto: ", reason, "\n\n"),
      report.ToString());
}

}  // namespace tessera
