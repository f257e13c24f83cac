#include <algorithm>
#include <iterator>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "config/config.pb.h"
#include "config/defaults.h"
#include "config/options/option_values.h"
#include "config/reader/json_options.pb.h"
#include "config/validate.h"
#include "google/protobuf/descriptor.h"
#include "optim/algorithms/algorithm.h"

namespace tessera {
namespace {

using google::protobuf::FieldDescriptor;

// Names of DeepSpeed's optimizers, which are compared without case, as
// DeepSpeed does, and of torch.optim's, as they are spelled. The table in
// optim/algorithms has those that run here, compared without case.
constexpr const char* kDeepSpeed[] = {
    "Adam",   "AdamW",   "Adagrad", "Lamb",       "Lion",       "Muon",
    "MuAdam", "MuAdamW", "MuSGD",   "OneBitAdam", "OneBitLamb", "ZeroOneAdam"};
constexpr const char* kTorch[] = {
    "Adadelta", "Adafactor", "Adamax", "ASGD", "LBFGS",     "NAdam",
    "RAdam",    "RMSprop",   "Rprop",  "SGD",  "SparseAdam"};

// Returns the names of all optimizers that are known, here or elsewhere.
std::vector<std::string> KnownNames() {
  std::vector<std::string> names(std::begin(kDeepSpeed), std::end(kDeepSpeed));
  names.insert(names.end(), std::begin(kTorch), std::end(kTorch));
  for (const std::string& ours : AlgorithmNames()) {
    if (std::find(names.begin(), names.end(), ours) == names.end()) {
      names.push_back(ours);
    }
  }
  return names;
}

// Returns the name as it is spelled; "" if there is no such name.
std::string FindName(const std::vector<std::string>& names,
                     const std::string& written) {
  for (const std::string& name : names) {
    const bool any_case = std::find(std::begin(kTorch), std::end(kTorch),
                                    name) == std::end(kTorch);
    if (any_case ? absl::EqualsIgnoreCase(name, written) : name == written) {
      return name;
    }
  }
  return "";
}

bool Has(const AlgorithmRow& row, const std::string& field) {
  if (field == "betas") return row.FindOrRest("beta1") != nullptr;
  if (field == "state_dtype" || field == "ema_decay") return true;
  return row.FindOrRest(field) != nullptr ||
         std::any_of(row.fields.begin(), row.fields.end(),
                     [&](const ConfigField& own) { return field == own.name; });
}

// `params` is OptimizerParams or GroupParams.
void CheckParameters(const google::protobuf::Message& params,
                     const std::string& path, const AlgorithmRow& row,
                     Faults* faults) {
  std::vector<const FieldDescriptor*> fields;
  params.GetReflection()->ListFields(params, &fields);
  for (const FieldDescriptor* field : fields) {
    const auto& options = field->options();
    if (Has(row, field->name()) || options.HasExtension(proto::no_effect) ||
        options.HasExtension(proto::refused) ||
        field->name() == "fp32_optimizer_states") {
      continue;
    }
    faults->Add(absl::StrCat(path, ".", field->name()), "'", row.name,
                "' has no such parameter");
  }
}

// Sets a field unless it has a value.
void SetField(const std::string& name, double value,
              proto::OptimizerParams* params) {
  const FieldDescriptor* const field =
      params->GetDescriptor()->FindFieldByName(name);
  const auto& reflection = *params->GetReflection();
  if (field == nullptr || reflection.HasField(*params, field)) return;
  if (field->cpp_type() == FieldDescriptor::CPPTYPE_BOOL) {
    reflection.SetBool(params, field, value != 0);
  } else if (field->cpp_type() == FieldDescriptor::CPPTYPE_INT64) {
    reflection.SetInt64(params, field, static_cast<int64_t>(value));
  } else {
    reflection.SetDouble(params, field, value);
  }
}

void FillFields(absl::Span<const ConfigField> fields,
                proto::OptimizerParams* params) {
  const auto& reflection = *params->GetReflection();
  const auto find = [&](const char* name) {
    return params->GetDescriptor()->FindFieldByName(name);
  };
  for (const ConfigField& own : fields) {
    if (own.text == nullptr) {
      SetField(own.name,
               own.like == nullptr
                   ? own.number
                   : reflection.GetDouble(*params, find(own.like)),
               params);
    } else if (!reflection.HasField(*params, find(own.name))) {
      reflection.SetString(params, find(own.name), own.text);
    }
  }
}

void FillParameters(const AlgorithmRow& row, proto::OptimizerParams* params) {
  const auto fill = [&](absl::Span<const Option> options) {
    for (const Option& option : options) {
      if (option.value.has_value()) {
        SetField(option.name, *option.value, params);
      }
    }
  };
  fill(row.options);
  if (row.rest != nullptr) fill(row.rest->options);
  if (!params->has_state_dtype()) params->set_state_dtype("fp32");
  if (!params->has_ema_decay()) params->set_ema_decay(0);
  FillFields(row.fields, params);
}

template <typename Betas>
void CheckBetas(const std::string& path, const AlgorithmRow& row,
                const Betas& betas, Faults* faults) {
  if (betas.size() != 2) {
    faults->Add(path, "expected two numbers, got ", betas.size());
  } else if (row.averages && betas[0] == 0) {
    faults->Add(path + "[0]", "expected above 0 with ", row.name,
                ": without it the average cannot be found");
  }
}

void CheckStates(const AlgorithmRow& row, const proto::OptimizerParams& params,
                 const std::string& path, Faults* faults) {
  if (row.why_float32 != nullptr && params.state_dtype() != "fp32") {
    faults->Add(path + ".state_dtype", "expected fp32", row.why_float32,
                ", got ", params.state_dtype());
  }
  if (row.averages && params.ema_decay() != 0) {
    faults->Add(path + ".ema_decay", "expected 0 with ", row.name,
                ", which has an average of its own");
  }
}

void CheckTogether(const AlgorithmRow& row, const OptimizerOptions& options,
                   const std::string& path, Faults* faults) {
  if (row.check == nullptr) return;
  const OptionFault fault = row.check(options);
  if (!fault.text.empty()) {
    faults->Add(absl::StrCat(path, ".", fault.option), fault.text);
  }
}

// Returns the options of all parameters that the algorithm is for.
OptimizerOptions ResolveParameters(Algorithm algorithm, bool bf16_states,
                                   proto::OptimizerParams* params,
                                   Faults* faults) {
  const AlgorithmRow& row = RowOf(algorithm);
  const std::string path = "optimizer.params";
  CheckParameters(*params, path, row, faults);
  if (bf16_states && !params->has_state_dtype() && row.why_float32 == nullptr) {
    params->set_state_dtype("bf16");
  }
  FillParameters(row, params);
  if (const Option* const beta1 = row.FindOrRest("beta1")) {
    // An empty list in a file is no request for the defaults.
    if (params->betas_size() == 0 && !faults->IsWritten(path + ".betas")) {
      params->add_betas(*beta1->value);
      params->add_betas(*row.FindOrRest("beta2")->value);
    }
    CheckBetas(path + ".betas", row, params->betas(), faults);
  }
  CheckStates(row, *params, path, faults);
  OptimizerOptions options;
  options.algorithm = algorithm;
  ReadOptions(*params, /*defaults=*/true, &options);
  CheckTogether(row, options, path, faults);
  return options;
}

bool IsReserved(const std::string& group) {
  return group == "default" || group == "no_decay" || group == "muon";
}

// `options`: those of parameters in no group.
void ResolveGroup(int number, OptimizerOptions options,
                  proto::Optimizer* optimizer, Faults* faults) {
  const AlgorithmRow& row = RowOf(options.algorithm);
  const std::string path = absl::StrCat("optimizer.param_groups[", number, "]");
  proto::ParamGroup& group = *optimizer->mutable_param_groups(number);
  if (!group.has_name()) group.set_name(absl::StrCat("group ", number + 1));
  const auto& all = optimizer->param_groups();
  const bool taken =
      std::any_of(all.begin(), all.begin() + number,
                  [&](const auto& g) { return g.name() == group.name(); });
  if (taken || IsReserved(group.name())) {
    faults->Add(path + ".name", "there is another group '", group.name(), "'");
  }
  if (group.parameters_size() == 0 && group.modules_size() == 0) {
    faults->Add(path, "expected patterns of parameters, or classes of modules");
  }
  const proto::GroupParams& params = group.params();
  const std::string inside = path + ".params";
  CheckParameters(params, inside, row, faults);
  if (params.betas_size() != 0) {
    CheckBetas(inside + ".betas", row, params.betas(), faults);
  }
  if (group.use_muon() && row.rest == nullptr) {
    faults->Add(path + ".use_muon", "expected false, of the optimizer ",
                row.name);
  }
  const Formula formula = row.formula(options);
  ReadOptions(params, /*defaults=*/false, &options);
  if (row.formula(options) != formula) {
    faults->Add(inside + ".momentum",
                "expected 0 for all groups or for none: with a momentum there "
                "are other states");
  }
  CheckTogether(row, options, inside, faults);
}

// The operators of torch::optim are called for plain AdamW; libtorch's kernel
// has AMSGrad and maximize, too.
void CheckExact(const proto::Config& config, Faults* faults) {
  const proto::OptimizerParams& params = config.optimizer().params();
  const bool corrected = params.adam_w_mode() && params.bias_correction() &&
                         params.state_dtype() == "fp32";
  const bool plain = corrected && !params.amsgrad() && !params.maximize();
  const bool exact = config.precision().libtorch_exact();
  const bool fused = config.precision().libtorch_fused();
  if (exact && !plain) {
    faults->Add("precision.libtorch_exact",
                "expected AdamW with adam_w_mode and bias_correction, without "
                "amsgrad and maximize, and state_dtype fp32");
  }
  if (fused && !corrected) {
    faults->Add("precision.libtorch_fused",
                "expected AdamW with adam_w_mode, bias_correction and "
                "state_dtype fp32");
  }
  if (exact && fused) {
    faults->Add("precision.libtorch_fused",
                "expected this or libtorch_exact, which have different bits");
  }
}

}  // namespace

void ResolveOptimizer(proto::Config* config, Faults* faults) {
  // {} is as if absent, as in DeepSpeed.
  if (config->optimizer().ByteSizeLong() == 0) config->clear_optimizer();
  if (!config->has_optimizer()) return;
  proto::Optimizer& optimizer = *config->mutable_optimizer();
  const bool bf16_states =
      config->bf16().enabled() && config->bf16().bf16_optimizer_states();
  const std::vector<std::string> known = KnownNames();
  const std::string type = FindName(known, optimizer.type());
  if (!optimizer.has_type()) {
    faults->Add("optimizer.type", "missing: expected Adam, AdamW or another");
  } else if (type.empty()) {
    faults->AddUnknown(
        "optimizer.type", optimizer.type(),
        "Adam, AdamW, or another optimizer of DeepSpeed or torch.optim",
        AlgorithmNames(), known);
  } else {
    optimizer.set_type(type);
    if (type == "OneBitAdam" || type == "OneBitLamb" || type == "ZeroOneAdam") {
      faults->Note("optimizer.type", type,
                   ": DeepSpeed 0.19.8 has removed it: use AdamW");
    }
    const std::optional<Algorithm> ours = FindAlgorithm(type);
    if (!ours.has_value()) return;
    const OptimizerOptions options = ResolveParameters(
        *ours, bf16_states, optimizer.mutable_params(), faults);
    for (int i = 0; i < optimizer.param_groups_size(); ++i) {
      ResolveGroup(i, options, &optimizer, faults);
    }
    if (!optimizer.has_no_decay()) optimizer.set_no_decay("off");
    CheckExact(*config, faults);
    return;
  }
  ResolveParameters(Algorithm::kAdamW, bf16_states, optimizer.mutable_params(),
                    faults);
}

void ResolveGradients(proto::Config* config, Faults* faults) {
  FillDefaults(config);
  const double p = config->gradient_clipping_norm();
  if (!(p > 0)) {
    faults->Add("gradient_clipping_norm",
                "expected a number above 0, or inf, got ", p);
  }
}

}  // namespace tessera
