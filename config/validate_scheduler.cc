#include <algorithm>
#include <cstdint>
#include <iterator>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "base/check.h"
#include "config/config.pb.h"
#include "config/defaults.h"
#include "config/reader/field_path.h"
#include "config/reader/json_options.pb.h"
#include "config/validate.h"
#include "google/protobuf/descriptor.h"
#include "google/protobuf/text_format.h"
#include "optim/algorithms/algorithm.h"

namespace tessera {
namespace {

using google::protobuf::FieldDescriptor;

// These exist in torch.optim.lr_scheduler, but not here.
constexpr const char* kOthers[] = {"ChainedScheduler", "LambdaLR",
                                   "MultiplicativeLR", "SequentialLR"};

struct Schedule {
  const char* name;
  bool of_deepspeed;
  // It has rates of its own; all others multiply each group's.
  bool one_rate;
  const char* needed;    // parameters that must be given
  const char* defaults;  // of the others, as protobuf text; see Fill for more
};
// DeepSpeed's, torch's, and our own.
constexpr Schedule kSchedules[] = {
    {"LRRangeTest", true, true, "",
     "last_batch_iteration: -1 lr_range_test_min_lr: 1e-3 "
     "lr_range_test_step_size: 2000 lr_range_test_step_rate: 1 "
     "lr_range_test_staircase: false"},
    {"OneCycle", true, true, "cycle_min_lr cycle_max_lr",
     "last_batch_iteration: -1 decay_lr_rate: 0 cycle_first_step_size: 2000 "
     "cycle_first_stair_count: 0 decay_step_size: 0 cycle_momentum: true "
     "cycle_min_mom: 0.8 cycle_max_mom: 0.9 decay_mom_rate: 0"},
    {"WarmupLR", true, true, "",
     "last_batch_iteration: -1 warmup_num_steps: 1000 warmup_type: 'log' "
     "warmup_min_lr: 0"},
    {"WarmupDecayLR", true, true, "total_num_steps",
     "last_batch_iteration: -1 warmup_num_steps: 1000 warmup_type: 'log' "
     "warmup_min_lr: 0 warmup_max_lr: 1e-3"},
    {"WarmupCosineLR", true, false, "total_num_steps",
     "last_batch_iteration: -1 warmup_num_steps: 1000 warmup_type: 'log' "
     "warmup_min_ratio: 0 cos_min_ratio: 1e-4"},
    {"ConstantLR", false, false, "",
     "last_epoch: -1 factor: 0.3333333333333333 total_iters: 5"},
    {"CosineAnnealingLR", false, false, "T_max",
     "last_epoch: -1 eta_min: 0 after: 'rise'"},
    {"CosineAnnealingWarmRestarts", false, false, "T_0",
     "last_epoch: -1 eta_min: 0 T_mult: 1"},
    {"CyclicLR", false, true, "base_lr max_lr",
     "last_epoch: -1 step_size_up: 2000 mode: 'triangular' gamma: 1 "
     "cycle_momentum: true base_momentum: 0.8 max_momentum: 0.9"},
    {"ExponentialLR", false, false, "gamma", "last_epoch: -1"},
    {"LinearLR", false, false, "",
     "last_epoch: -1 start_factor: 0.3333333333333333 end_factor: 1 "
     "total_iters: 5"},
    {"MultiStepLR", false, false, "milestones", "last_epoch: -1 gamma: 0.1"},
    {"OneCycleLR", false, true, "max_lr total_steps",
     "last_epoch: -1 pct_start: 0.3 anneal_strategy: 'cos' "
     "cycle_momentum: true base_momentum: 0.85 max_momentum: 0.95 "
     "div_factor: 25 final_div_factor: 1e4 three_phase: false"},
    {"PolynomialLR", false, false, "",
     "last_epoch: -1 power: 1 total_iters: 5"},
    {"ReduceLROnPlateau", false, false, "",
     "mode: 'min' factor: 0.1 patience: 10 threshold: 1e-4 "
     "threshold_mode: 'rel' cooldown: 0 min_lr: 0 eps: 1e-8"},
    {"StepLR", false, false, "step_size", "last_epoch: -1 gamma: 0.1"},
    {"WSD", false, false, "total_num_steps decay_num_steps",
     "warmup_num_steps: 0 warmup_min_ratio: 0 decay_type: 'linear' "
     "decay_min_ratio: 0"},
};

const Schedule* Find(absl::string_view type) {
  for (const Schedule& schedule : kSchedules) {
    if (schedule.name == type) return &schedule;
  }
  return nullptr;
}

std::vector<std::string> NeededBy(const Schedule& schedule) {
  return absl::StrSplit(schedule.needed, ' ', absl::SkipEmpty());
}

// Fills in what is absent, except for what must be given.
void Fill(const Schedule& schedule, double optimizer_lr,
          proto::SchedulerParams* params) {
  proto::SchedulerParams p;
  TESSERA_CHECK(
      google::protobuf::TextFormat::ParseFromString(schedule.defaults, &p))
      << schedule.name;
  const absl::string_view name = schedule.name;
  if (name == "WarmupLR") p.set_warmup_max_lr(optimizer_lr);
  p.MergeFrom(*params);
  *params = std::move(p);
  // These follow from others.
  if (name == "OneCycle" && !params->has_cycle_second_step_size()) {
    params->set_cycle_second_step_size(params->cycle_first_step_size());
  }
  if (name == "OneCycle" && !params->has_cycle_second_stair_count()) {
    params->set_cycle_second_stair_count(params->cycle_first_stair_count());
  }
  if (name == "CyclicLR" && !params->has_step_size_down()) {
    params->set_step_size_down(params->step_size_up());
  }
  if (name == "OneCycleLR" && !params->has_total_steps() &&
      params->has_epochs() && params->has_steps_per_epoch()) {
    params->set_total_steps(params->epochs() * params->steps_per_epoch());
  }
}

std::string Path(absl::string_view name) {
  return absl::StrCat("scheduler.params.", name);
}

// Checks for parameters that the schedule does not have, and for missing ones.
// `params` are as written, `filled` have defaults.
void CheckNames(const Schedule& schedule, const proto::SchedulerParams& params,
                const proto::SchedulerParams& filled, Faults* faults) {
  proto::SchedulerParams known;
  Fill(schedule, 0, &known);
  std::vector<std::string> names = NeededBy(schedule);
  const std::vector<std::string> needed = names;
  if (absl::string_view(schedule.name) == "OneCycleLR") {
    names.insert(names.end(), {"epochs", "steps_per_epoch"});
  }
  std::vector<const FieldDescriptor*> fields;
  params.GetReflection()->ListFields(params, &fields);
  for (const FieldDescriptor* field : fields) {
    if (HasField(known, field->name()) ||
        field->options().HasExtension(proto::no_effect) ||
        std::find(names.begin(), names.end(), field->name()) != names.end()) {
      continue;
    }
    faults->Add(Path(field->name()), "'", schedule.name,
                "' has no such parameter");
  }
  for (const std::string& name : needed) {
    if (HasField(filled, name)) continue;
    faults->Add(Path(name), "missing: '", schedule.name, "' needs it",
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
                ": a run continues from its checkpoint");
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
                      const Schedule& schedule, const proto::SchedulerParams& p,
                      Faults* faults) {
  const std::string& of = optimizer.type();
  const std::optional<Algorithm> algorithm = FindAlgorithm(of);
  if (!p.cycle_momentum() || !algorithm.has_value()) return;
  const AlgorithmRow& row = RowOf(*algorithm);
  if (row.averages) {
    faults->Add(Path("cycle_momentum"), "write false with ", of,
                ": its average is found by one beta1");
  }
  if (schedule.of_deepspeed || row.FindOrRest("beta1") != nullptr ||
      optimizer.params().momentum() > 0) {
    return;
  }
  faults->Add(Path("cycle_momentum"),
              "needs an optimizer with betas or with a ",
              "momentum above 0; write false with ", of);
}

void NoteRatesWithoutEffect(const proto::Optimizer& optimizer,
                            const Schedule& schedule, Faults* faults) {
  const auto note = [&](const std::string& path) {
    faults->Note(path, "has no effect: '", schedule.name,
                 "' gives all groups one rate, by its own parameters");
  };
  if (!schedule.one_rate) return;
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

bool IsSchedule(absl::string_view type) { return Find(type) != nullptr; }

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
  std::vector<std::string> ours;
  for (const Schedule& schedule : kSchedules) ours.push_back(schedule.name);
  std::vector<std::string> known = ours;
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
                       ours, known);
  } else if (const Schedule* const schedule = Find(type)) {
    const proto::SchedulerParams written = scheduler.params();
    Fill(*schedule, config->optimizer().params().lr(),
         scheduler.mutable_params());
    CheckNames(*schedule, written, scheduler.params(), faults);
    CheckValues(type, scheduler.params(), faults);
    CheckHasMomentum(config->optimizer(), *schedule, scheduler.params(),
                     faults);
    NoteRatesWithoutEffect(config->optimizer(), *schedule, faults);
  }
}

}  // namespace tessera
