#include <algorithm>
#include <cstdint>
#include <iterator>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "config/config.pb.h"
#include "config/defaults.h"
#include "config/reader/json_options.pb.h"
#include "config/validate.h"
#include "google/protobuf/descriptor.h"
#include "optim/algorithms/algorithm.h"

namespace tessera {
namespace {

using google::protobuf::FieldDescriptor;

// These exist in torch.optim.lr_scheduler, but not here.
constexpr const char* kOthers[] = {"ChainedScheduler", "LambdaLR",
                                   "MultiplicativeLR", "SequentialLR"};
constexpr const char* kDeepSpeed[] = {"LRRangeTest", "OneCycle", "WarmupLR",
                                      "WarmupDecayLR", "WarmupCosineLR"};

// These schedules have rates of their own; all others multiply each group's.
constexpr const char* kOfOneRate[] = {"LRRangeTest", "OneCycle",
                                      "WarmupLR",    "WarmupDecayLR",
                                      "OneCycleLR",  "CyclicLR"};

// Sets the field if it is absent.
#define TESSERA_DEFAULT(field, value) \
  if (!params->has_##field()) params->set_##field(value)

void FillWarmup(proto::SchedulerParams* params) {
  TESSERA_DEFAULT(warmup_num_steps, 1000);
  TESSERA_DEFAULT(warmup_type, "log");
}

void FillOneCycle(proto::SchedulerParams* params) {
  TESSERA_DEFAULT(decay_lr_rate, 0);
  TESSERA_DEFAULT(cycle_first_step_size, 2000);
  TESSERA_DEFAULT(cycle_second_step_size, params->cycle_first_step_size());
  TESSERA_DEFAULT(cycle_first_stair_count, 0);
  TESSERA_DEFAULT(cycle_second_stair_count, params->cycle_first_stair_count());
  TESSERA_DEFAULT(decay_step_size, 0);
  TESSERA_DEFAULT(cycle_momentum, true);
  TESSERA_DEFAULT(cycle_min_mom, 0.8);
  TESSERA_DEFAULT(cycle_max_mom, 0.9);
  TESSERA_DEFAULT(decay_mom_rate, 0);
}

void FillRangeTest(proto::SchedulerParams* params) {
  TESSERA_DEFAULT(lr_range_test_min_lr, 1e-3);
  TESSERA_DEFAULT(lr_range_test_step_size, 2000);
  TESSERA_DEFAULT(lr_range_test_step_rate, 1);
  TESSERA_DEFAULT(lr_range_test_staircase, false);
}

// Fills in DeepSpeed's defaults, except for what must be given.
void FillDeepSpeed(const std::string& type, double optimizer_lr,
                   proto::SchedulerParams* params) {
  TESSERA_DEFAULT(last_batch_iteration, -1);
  if (type == "OneCycle") return FillOneCycle(params);
  if (type == "LRRangeTest") return FillRangeTest(params);
  FillWarmup(params);
  if (type == "WarmupCosineLR") {
    TESSERA_DEFAULT(warmup_min_ratio, 0);
    TESSERA_DEFAULT(cos_min_ratio, 1e-4);
    return;
  }
  TESSERA_DEFAULT(warmup_min_lr, 0);
  TESSERA_DEFAULT(warmup_max_lr, type == "WarmupLR" ? optimizer_lr : 1e-3);
}

void FillOneCycleLr(proto::SchedulerParams* params) {
  if (params->has_epochs() && params->has_steps_per_epoch()) {
    TESSERA_DEFAULT(total_steps, params->epochs() * params->steps_per_epoch());
  }
  TESSERA_DEFAULT(pct_start, 0.3);
  TESSERA_DEFAULT(anneal_strategy, "cos");
  TESSERA_DEFAULT(cycle_momentum, true);
  TESSERA_DEFAULT(base_momentum, 0.85);
  TESSERA_DEFAULT(max_momentum, 0.95);
  TESSERA_DEFAULT(div_factor, 25);
  TESSERA_DEFAULT(final_div_factor, 1e4);
  TESSERA_DEFAULT(three_phase, false);
}

void FillCyclicLr(proto::SchedulerParams* params) {
  TESSERA_DEFAULT(step_size_up, 2000);
  TESSERA_DEFAULT(step_size_down, params->step_size_up());
  TESSERA_DEFAULT(mode, "triangular");
  TESSERA_DEFAULT(gamma, 1);
  TESSERA_DEFAULT(cycle_momentum, true);
  TESSERA_DEFAULT(base_momentum, 0.8);
  TESSERA_DEFAULT(max_momentum, 0.9);
}

void FillPlateau(proto::SchedulerParams* params) {
  TESSERA_DEFAULT(mode, "min");
  TESSERA_DEFAULT(factor, 0.1);
  TESSERA_DEFAULT(patience, 10);
  TESSERA_DEFAULT(threshold, 1e-4);
  TESSERA_DEFAULT(threshold_mode, "rel");
  TESSERA_DEFAULT(cooldown, 0);
  TESSERA_DEFAULT(min_lr, 0);
  TESSERA_DEFAULT(eps, 1e-8);
}

void FillWsd(proto::SchedulerParams* params) {
  TESSERA_DEFAULT(warmup_num_steps, 0);
  TESSERA_DEFAULT(warmup_min_ratio, 0);
  TESSERA_DEFAULT(decay_type, "linear");
  TESSERA_DEFAULT(decay_min_ratio, 0);
}

// Fills in torch's defaults.
void FillTorch(const std::string& type, proto::SchedulerParams* params) {
  TESSERA_DEFAULT(last_epoch, -1);
  if (type == "OneCycleLR") return FillOneCycleLr(params);
  if (type == "CyclicLR") return FillCyclicLr(params);
  if (type == "StepLR" || type == "MultiStepLR") TESSERA_DEFAULT(gamma, 0.1);
  if (type == "ConstantLR") TESSERA_DEFAULT(factor, 1.0 / 3.0);
  if (type == "LinearLR") {
    TESSERA_DEFAULT(start_factor, 1.0 / 3.0);
    TESSERA_DEFAULT(end_factor, 1);
  }
  if (type == "PolynomialLR") TESSERA_DEFAULT(power, 1);
  if (type == "ConstantLR" || type == "LinearLR" || type == "PolynomialLR") {
    TESSERA_DEFAULT(total_iters, 5);
  }
  if (type == "CosineAnnealingLR" || type == "CosineAnnealingWarmRestarts") {
    TESSERA_DEFAULT(eta_min, 0);
  }
  if (type == "CosineAnnealingLR") TESSERA_DEFAULT(after, "rise");
  if (type == "CosineAnnealingWarmRestarts") TESSERA_DEFAULT(t_mult, 1);
}

bool IsDeepSpeeds(const std::string& type) {
  return std::find(std::begin(kDeepSpeed), std::end(kDeepSpeed), type) !=
         std::end(kDeepSpeed);
}

void Fill(const std::string& type, double optimizer_lr,
          proto::SchedulerParams* params) {
  if (IsDeepSpeeds(type)) return FillDeepSpeed(type, optimizer_lr, params);
  if (type == "ReduceLROnPlateau") return FillPlateau(params);
  if (type == "WSD") return FillWsd(params);
  FillTorch(type, params);
}
#undef TESSERA_DEFAULT

std::vector<std::string> NeededBy(const std::string& type) {
  static const auto* const needed =
      new std::map<std::string, std::vector<std::string>>{
          {"OneCycle", {"cycle_min_lr", "cycle_max_lr"}},
          {"WarmupDecayLR", {"total_num_steps"}},
          {"WarmupCosineLR", {"total_num_steps"}},
          {"StepLR", {"step_size"}},
          {"MultiStepLR", {"milestones"}},
          {"ExponentialLR", {"gamma"}},
          {"CosineAnnealingLR", {"T_max"}},
          {"CosineAnnealingWarmRestarts", {"T_0"}},
          {"OneCycleLR", {"max_lr", "total_steps"}},
          {"CyclicLR", {"base_lr", "max_lr"}},
          {"WSD", {"total_num_steps", "decay_num_steps"}}};
  const auto it = needed->find(type);
  return it == needed->end() ? std::vector<std::string>() : it->second;
}

const FieldDescriptor* FieldOf(const proto::SchedulerParams& params,
                               const std::string& name) {
  return params.GetDescriptor()->FindFieldByName(name);
}

bool Holds(const proto::SchedulerParams& params, const FieldDescriptor& field) {
  const auto& reflection = *params.GetReflection();
  return field.is_repeated() ? reflection.FieldSize(params, &field) > 0
                             : reflection.HasField(params, &field);
}

std::string Path(absl::string_view name) {
  return absl::StrCat("scheduler.params.", name);
}

// Checks for parameters that the type does not have, and for missing ones.
// `params` are as written, `filled` have defaults.
void CheckNames(const std::string& type, const proto::SchedulerParams& params,
                const proto::SchedulerParams& filled, Faults* faults) {
  proto::SchedulerParams known;
  Fill(type, 0, &known);
  std::vector<std::string> names = NeededBy(type);
  if (type == "OneCycleLR") {
    names.insert(names.end(), {"epochs", "steps_per_epoch"});
  }
  std::vector<const FieldDescriptor*> fields;
  params.GetReflection()->ListFields(params, &fields);
  for (const FieldDescriptor* field : fields) {
    if (Holds(known, *field) ||
        field->options().HasExtension(proto::no_effect) ||
        std::find(names.begin(), names.end(), field->name()) != names.end()) {
      continue;
    }
    faults->Add(Path(field->name()), "'", type, "' has no such parameter");
  }
  for (const std::string& name : NeededBy(type)) {
    if (Holds(filled, *FieldOf(params, name))) continue;
    faults->Add(Path(name), "missing: '", type, "' needs it",
                name == "total_steps" ? ", or epochs and steps_per_epoch" : "");
  }
}

void CheckOneCycleLr(const proto::SchedulerParams& p, Faults* faults) {
  if (p.has_epochs() && p.has_steps_per_epoch() &&
      p.total_steps() != p.epochs() * p.steps_per_epoch()) {
    faults->Add(Path("total_steps"), "expected epochs * steps_per_epoch = ",
                p.epochs() * p.steps_per_epoch(), ", got ", p.total_steps(),
                "; leave it out, or them");
  }
  // Here torch divides by 0.
  if (p.pct_start() * static_cast<double>(p.total_steps()) == 1) {
    faults->Add(Path("pct_start"), "times total_steps is 1, so that the rise ",
                "has no steps; got ", p.pct_start(), " of ", p.total_steps());
  }
}

void CheckWsd(const proto::SchedulerParams& p, Faults* faults) {
  if (!(p.warmup_min_ratio() >= 0 && p.warmup_min_ratio() <= 1)) {
    faults->Add(Path("warmup_min_ratio"), "expected 0 to 1, got ",
                p.warmup_min_ratio());
  }
  if (!p.has_total_num_steps() || !p.has_decay_num_steps()) return;
  int64_t both = 0;
  if (__builtin_add_overflow(p.warmup_num_steps(), p.decay_num_steps(),
                             &both) ||
      both > p.total_num_steps()) {
    faults->Add(Path("total_num_steps"),
                "expected at least warmup_num_steps + decay_num_steps, ",
                p.warmup_num_steps(), " + ", p.decay_num_steps(), ", got ",
                p.total_num_steps());
  }
}

void CheckMilestones(const proto::SchedulerParams& p, Faults* faults) {
  const auto& milestones = p.milestones();
  if (std::is_sorted(milestones.begin(), milestones.end())) return;
  faults->Add(Path("milestones"), "expected ascending steps, got ",
              absl::StrJoin(milestones, ", "));
}

// Checks what the range of a field (config/scheduler.proto) cannot express. `p`
// is filled.
void CheckValues(const std::string& type, const proto::SchedulerParams& p,
                 Faults* faults) {
  if (p.has_last_epoch() && p.last_epoch() != -1) {
    faults->Add(Path("last_epoch"), "expected -1, got ", p.last_epoch(),
                ": a run goes on from its checkpoint");
  }
  const bool plateau = type == "ReduceLROnPlateau";
  if (p.has_mode() && plateau != (p.mode() == "min" || p.mode() == "max")) {
    faults->Add(Path("mode"), "expected ",
                plateau ? "min or max" : "triangular, triangular2 or exp_range",
                ", got '", p.mode(), "'");
  }
  if (plateau && p.factor() >= 1) {
    faults->Add(Path("factor"), "expected less than 1, got ", p.factor());
  }
  if (type == "ConstantLR" && p.factor() == 0) {
    faults->Add(Path("factor"), "expected above 0, got 0");
  }
  if (type == "MultiStepLR") CheckMilestones(p, faults);
  if (type == "OneCycleLR") CheckOneCycleLr(p, faults);
  if (type == "WSD") CheckWsd(p, faults);
}

// Checks that the optimizer has the momentum that torch sets there.
void CheckHasMomentum(const proto::Optimizer& optimizer,
                      const std::string& type, const proto::SchedulerParams& p,
                      Faults* faults) {
  const std::string& of = optimizer.type();
  const std::optional<Algorithm> algorithm = FindAlgorithm(of);
  if (!p.cycle_momentum() || !algorithm.has_value()) return;
  const AlgorithmRow& row = RowOf(*algorithm);
  if (row.averages) {
    faults->Add(Path("cycle_momentum"), "write false with ", of,
                ": its average is found by one beta1");
  }
  if (IsDeepSpeeds(type) || row.FindOrRest("beta1") != nullptr ||
      optimizer.params().momentum() > 0) {
    return;
  }
  faults->Add(Path("cycle_momentum"),
              "needs an optimizer with betas or with a ",
              "momentum above 0; write false with ", of);
}

void NoteRatesWithoutEffect(const proto::Optimizer& optimizer,
                            const std::string& type, Faults* faults) {
  const auto note = [&](const std::string& path) {
    faults->Note(path, "has no effect: '", type,
                 "' gives all groups one rate, by its own parameters");
  };
  if (std::find(std::begin(kOfOneRate), std::end(kOfOneRate), type) ==
      std::end(kOfOneRate)) {
    return;
  }
  for (int i = 0; i < optimizer.param_groups_size(); ++i) {
    if (!optimizer.param_groups(i).params().has_lr()) continue;
    note(absl::StrCat("optimizer.param_groups[", i, "].params.lr"));
  }
  if (optimizer.type() == "Muon") note("optimizer.params.muon_lr");
}

void ResolveWarmup(proto::Scheduler* scheduler, Faults* faults) {
  proto::SchedulerWarmup& warmup = *scheduler->mutable_warmup();
  if (!warmup.has_num_steps()) {
    faults->Add("scheduler.warmup.num_steps",
                "missing: a warmup needs it (0: none)");
  }
  FillDefaults(&warmup);
  if (!warmup.has_start_factor()) warmup.set_start_factor(1.0 / 3.0);
  const std::string& type = scheduler->type();
  if (type == "WSD" || absl::StartsWith(type, "Warmup")) {
    faults->Add("scheduler.warmup", "'", type, "' has a warmup of its own: ",
                "use scheduler.params.warmup_num_steps");
  }
}

}  // namespace

const std::vector<std::string>& ScheduleNames() {
  static const auto* const names = new std::vector<std::string>(absl::StrSplit(
      "LRRangeTest,OneCycle,WarmupLR,WarmupDecayLR,WarmupCosineLR,ConstantLR,"
      "CosineAnnealingLR,CosineAnnealingWarmRestarts,CyclicLR,ExponentialLR,"
      "LinearLR,MultiStepLR,OneCycleLR,PolynomialLR,ReduceLROnPlateau,StepLR,"
      "WSD",
      ','));
  return *names;
}

bool IsSchedule(absl::string_view type) {
  const std::vector<std::string>& names = ScheduleNames();
  return std::find(names.begin(), names.end(), type) != names.end();
}

std::string InsteadOfSchedule(absl::string_view type) {
  return type == "SequentialLR" || type == "ChainedScheduler"
             ? "use scheduler.warmup for steps before another schedule"
             : "call Engine::SetLearningRate before each Step instead";
}

void ResolveScheduler(proto::Config* config, Faults* faults) {
  // {} counts as absent, as in DeepSpeed.
  if (config->scheduler().ByteSizeLong() == 0) config->clear_scheduler();
  if (!config->has_scheduler()) return;
  proto::Scheduler& scheduler = *config->mutable_scheduler();
  const std::string& type = scheduler.type();
  std::vector<std::string> known = ScheduleNames();
  known.insert(known.end(), std::begin(kOthers), std::end(kOthers));
  if (scheduler.has_warmup()) ResolveWarmup(&scheduler, faults);
  if (!scheduler.has_type()) {
    if (!scheduler.has_warmup()) {
      faults->Add("scheduler.type", "missing: expected WarmupLR or another");
    } else if (scheduler.params().ByteSizeLong() > 0) {
      faults->Add("scheduler.type", "missing, and there are params");
    }
  } else if (std::find(known.begin(), known.end(), type) == known.end()) {
    faults->AddUnknown("scheduler.type", type,
                       "a schedule of DeepSpeed or torch.optim.lr_scheduler, "
                       "or WSD",
                       ScheduleNames(), known);
  } else if (IsSchedule(type)) {
    const proto::SchedulerParams written = scheduler.params();
    Fill(type, config->optimizer().params().lr(), scheduler.mutable_params());
    CheckNames(type, written, scheduler.params(), faults);
    CheckValues(type, scheduler.params(), faults);
    CheckHasMomentum(config->optimizer(), type, scheduler.params(), faults);
    NoteRatesWithoutEffect(config->optimizer(), type, faults);
  }
}

}  // namespace tessera
