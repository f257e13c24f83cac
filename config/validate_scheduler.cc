#include <algorithm>
#include <iterator>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "config/validate.h"
#include "google/protobuf/descriptor.h"

namespace tessera {
namespace {

using google::protobuf::FieldDescriptor;

constexpr const char* kTorch[] = {"ChainedScheduler",
                                  "ConstantLR",
                                  "CosineAnnealingLR",
                                  "CosineAnnealingWarmRestarts",
                                  "CyclicLR",
                                  "ExponentialLR",
                                  "LambdaLR",
                                  "LinearLR",
                                  "MultiplicativeLR",
                                  "MultiStepLR",
                                  "OneCycleLR",
                                  "PolynomialLR",
                                  "ReduceLROnPlateau",
                                  "SequentialLR",
                                  "StepLR"};

// Sets what is absent.
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

// DeepSpeed's defaults, except for what must be given.
void Fill(const std::string& type, double optimizer_lr,
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
#undef TESSERA_DEFAULT

std::vector<std::string> NeededBy(const std::string& type) {
  if (type == "OneCycle") return {"cycle_min_lr", "cycle_max_lr"};
  if (type == "WarmupDecayLR" || type == "WarmupCosineLR") {
    return {"total_num_steps"};
  }
  return {};
}

const FieldDescriptor* FieldOf(const proto::SchedulerParams& params,
                               const std::string& name) {
  return params.GetDescriptor()->FindFieldByName(name);
}

// Parameters that the type does not have, and such as it needs.
void CheckParams(const std::string& type, const proto::SchedulerParams& params,
                 Faults* faults) {
  proto::SchedulerParams known;
  Fill(type, 0, &known);
  const std::vector<std::string> needed = NeededBy(type);
  std::vector<const FieldDescriptor*> fields;
  params.GetReflection()->ListFields(params, &fields);
  for (const FieldDescriptor* field : fields) {
    const bool has =
        (!field->is_repeated() &&
         known.GetReflection()->HasField(known, field)) ||
        std::find(needed.begin(), needed.end(), field->name()) != needed.end();
    if (has) continue;
    faults->Add(absl::StrCat("scheduler.params.", field->name()), "'", type,
                "' has no such parameter");
  }
  for (const std::string& name : needed) {
    if (params.GetReflection()->HasField(params, FieldOf(params, name))) {
      continue;
    }
    faults->Add(absl::StrCat("scheduler.params.", name), "missing: '", type,
                "' needs it");
  }
}

}  // namespace

const std::vector<std::string>& ScheduleNames() {
  static const auto* const names = new std::vector<std::string>{
      "LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR"};
  return *names;
}

bool IsSchedule(absl::string_view type) {
  const std::vector<std::string>& names = ScheduleNames();
  return std::find(names.begin(), names.end(), type) != names.end();
}

void ResolveScheduler(proto::Config* config, Faults* faults) {
  // {} is as if absent, as in DeepSpeed.
  if (config->scheduler().ByteSizeLong() == 0) config->clear_scheduler();
  if (!config->has_scheduler()) return;
  proto::Scheduler& scheduler = *config->mutable_scheduler();
  const std::string& type = scheduler.type();
  std::vector<std::string> known = ScheduleNames();
  known.insert(known.end(), std::begin(kTorch), std::end(kTorch));
  if (!scheduler.has_type()) {
    faults->Add("scheduler.type", "missing: expected WarmupLR or another");
  } else if (std::find(known.begin(), known.end(), type) == known.end()) {
    faults->AddUnknown("scheduler.type", type,
                       "LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR, "
                       "WarmupCosineLR or a class of torch.optim.lr_scheduler",
                       known);
  } else if (IsSchedule(type)) {
    CheckParams(type, scheduler.params(), faults);
    Fill(type, config->optimizer().params().lr(), scheduler.mutable_params());
  }
}

}  // namespace tessera
