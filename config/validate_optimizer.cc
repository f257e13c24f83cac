#include <algorithm>
#include <iterator>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "config/config.pb.h"
#include "config/defaults.h"
#include "config/reader/json_options.pb.h"
#include "config/validate.h"
#include "google/protobuf/descriptor.h"

namespace tessera {
namespace {

using google::protobuf::FieldDescriptor;

// In any case, as DeepSpeed reads them.
constexpr const char* kDeepSpeed[] = {
    "Adam",   "AdamW",   "Adagrad", "Lamb",       "Lion",       "Muon",
    "MuAdam", "MuAdamW", "MuSGD",   "OneBitAdam", "OneBitLamb", "ZeroOneAdam"};
constexpr char kMuon[] = "Muon", kAdafactor[] = "Adafactor";
// Of neither; in any case, too. The second is a program's own.
constexpr char kScheduleFree[] = "AdamWScheduleFree", kCustom[] = "Custom";
constexpr const char* kTorch[] = {
    "Adadelta", "Adafactor", "Adamax", "ASGD", "LBFGS",     "NAdam",
    "RAdam",    "RMSprop",   "Rprop",  "SGD",  "SparseAdam"};

// What an optimizer has, each with its default.
struct Parameter {
  const char* field;
  double value;  // a flag's is 0 or 1
};
struct Known {
  const char* type;
  std::vector<Parameter> parameters;
  std::vector<double> betas;  // none: it has no such
};
const std::vector<Known>& KnownOptimizers() {
  static const std::vector<Parameter> adam = {
      {"lr", 1e-3},       {"eps", 1e-8},          {"weight_decay", 0},
      {"adam_w_mode", 1}, {"bias_correction", 1}, {"amsgrad", 0},
      {"maximize", 0}};
  static const auto* const known = new std::vector<Known>{
      {"Adam", adam, {0.9, 0.999}},
      {"AdamW", adam, {0.9, 0.999}},
      {"SGD",
       {{"lr", 1e-3},
        {"momentum", 0},
        {"dampening", 0},
        {"nesterov", 0},
        {"weight_decay", 0},
        {"maximize", 0}},
       {}},
      {"Adagrad",
       {{"lr", 1e-2},
        {"lr_decay", 0},
        {"weight_decay", 0},
        {"initial_accumulator_value", 0},
        {"eps", 1e-10},
        {"maximize", 0}},
       {}},
      {"RMSprop",
       {{"lr", 1e-2},
        {"alpha", 0.99},
        {"eps", 1e-8},
        {"weight_decay", 0},
        {"momentum", 0},
        {"centered", 0},
        {"maximize", 0}},
       {}},
      {"Lion",
       {{"lr", 1e-3}, {"weight_decay", 0}, {"maximize", 0}},
       {0.9, 0.99}},
      {"Lamb",
       {{"lr", 1e-3},
        {"eps", 1e-8},
        {"weight_decay", 0},
        {"bias_correction", 1},
        {"min_coeff", 0.01},
        {"max_coeff", 10},
        {"maximize", 0}},
       {0.9, 0.999}},
      {"Muon",
       {{"lr", 1e-3},
        {"momentum", 0.95},
        {"nesterov", 1},
        {"weight_decay", 0},
        {"eps", 1e-10},
        {"ns_steps", 5},
        {"maximize", 0}},
       {0.9, 0.95}},
      {"Adafactor",
       {{"lr", 1e-2},
        {"eps2", 1e-3},
        {"beta2_decay", -0.8},
        {"d", 1},
        {"weight_decay", 0},
        {"maximize", 0}},
       {}},
      {kScheduleFree,
       {{"lr", 2.5e-3},
        {"eps", 1e-8},
        {"weight_decay", 0},
        {"r", 0},
        {"weight_lr_power", 2},
        {"maximize", 0}},
       {0.9, 0.999}},
      {kCustom,
       {{"lr", 1e-3},
        {"eps", 1e-8},
        {"weight_decay", 0},
        {"bias_correction", 1},
        {"amsgrad", 0},
        {"momentum", 0},
        {"dampening", 0},
        {"nesterov", 0},
        {"alpha", 0.99},
        {"centered", 0},
        {"lr_decay", 0},
        {"initial_accumulator_value", 0},
        {"min_coeff", 0.01},
        {"max_coeff", 10},
        {"maximize", 0}},
       {0.9, 0.999}}};
  return *known;
}

const Known* FindKnown(const std::string& type) {
  for (const Known& known : KnownOptimizers()) {
    if (type == known.type) return &known;
  }
  return nullptr;
}

bool Is(absl::string_view type, const Known& known) {
  return type == known.type;
}

bool Has(const Known& known, const std::string& field) {
  if (field == "betas") return !known.betas.empty();
  if (field == "state_dtype" || field == "ema_decay") return true;
  const bool of_muon = field == "muon_lr" || field == "adam_lr" ||
                       field == "ns_method" || field == "adjust_lr_fn";
  if (of_muon) return Is(kMuon, known);
  if (field == "eps" && Is(kAdafactor, known))
    return true;  // the masters' dtype's
  return std::any_of(
      known.parameters.begin(), known.parameters.end(),
      [&](const Parameter& parameter) { return field == parameter.field; });
}

// The name as it is spelled; "" if there is none such.
template <typename Equal>
std::string Find(const std::vector<std::string>& names, const std::string& name,
                 Equal equal) {
  for (const std::string& known : names) {
    if (equal(known, name)) return known;
  }
  return "";
}

bool SameInAnyCase(const std::string& a, const std::string& b) {
  return absl::EqualsIgnoreCase(a, b);
}
bool Same(const std::string& a, const std::string& b) { return a == b; }

template <typename Names>
void Append(const Names& names, std::vector<std::string>* all) {
  all->insert(all->end(), std::begin(names), std::end(names));
}

// `params`: OptimizerParams or GroupParams.
void CheckParameters(const google::protobuf::Message& params,
                     const std::string& path, const Known& known,
                     Faults* faults) {
  std::vector<const FieldDescriptor*> fields;
  params.GetReflection()->ListFields(params, &fields);
  for (const FieldDescriptor* field : fields) {
    const auto& options = field->options();
    if (Has(known, field->name()) || options.HasExtension(proto::no_effect) ||
        options.HasExtension(proto::refused) ||
        field->name() == "fp32_optimizer_states") {
      continue;
    }
    faults->Add(absl::StrCat(path, ".", field->name()), "'", known.type,
                "' has no such parameter");
  }
}

void FillParameters(const Known& known, proto::OptimizerParams* params) {
  const auto& reflection = *params->GetReflection();
  for (const Parameter& parameter : known.parameters) {
    const FieldDescriptor* const field =
        params->GetDescriptor()->FindFieldByName(parameter.field);
    if (reflection.HasField(*params, field)) continue;
    if (field->cpp_type() == FieldDescriptor::CPPTYPE_BOOL) {
      reflection.SetBool(params, field, parameter.value != 0);
    } else if (field->cpp_type() == FieldDescriptor::CPPTYPE_INT64) {
      reflection.SetInt64(params, field, static_cast<int64_t>(parameter.value));
    } else {
      reflection.SetDouble(params, field, parameter.value);
    }
  }
  if (!params->has_state_dtype()) params->set_state_dtype("fp32");
  if (!params->has_ema_decay()) params->set_ema_decay(0);
  if (!Is(kMuon, known)) return;
  if (!params->has_muon_lr()) params->set_muon_lr(params->lr());
  if (!params->has_adam_lr()) params->set_adam_lr(params->lr());
  if (!params->has_ns_method()) params->set_ns_method("gram");
  if (!params->has_adjust_lr_fn()) params->set_adjust_lr_fn("original");
}

template <typename Betas>
void CheckBetas(const std::string& path, const Known& known, const Betas& betas,
                Faults* faults) {
  if (betas.size() != 2) {
    faults->Add(path, "expected two numbers, got ", betas.size());
  } else if (Is(kScheduleFree, known) && betas[0] == 0) {
    faults->Add(path + "[0]", "expected above 0 with ", known.type,
                ": without it the average cannot be found");
  }
}

// Of those whose states are float32 alone, else "".
std::string WhyFloat32(const Known& known) {
  // What else fits together is for the program to say.
  if (Is(kCustom, known)) return ", of a program's own optimizer";
  const std::string with = absl::StrCat(" with ", known.type, ", whose ");
  if (Is(kAdafactor, known)) return with + "states are few";
  // Of z nothing may be lost.
  return Is(kScheduleFree, known) ? with + "state z is as good as a master"
                                  : "";
}

void CheckStates(const Known& known, const proto::OptimizerParams& params,
                 const std::string& path, Faults* faults) {
  const std::string why = WhyFloat32(known);
  if (!why.empty() && params.state_dtype() != "fp32") {
    faults->Add(path + ".state_dtype", "expected fp32", why, ", got ",
                params.state_dtype());
  }
  if (Is(kScheduleFree, known) && params.ema_decay() != 0) {
    faults->Add(path + ".ema_decay", "expected 0 with ", known.type,
                ", which has an average of its own");
  }
}

void CheckNesterov(const std::string& path, bool nesterov, double momentum,
                   double dampening, Faults* faults) {
  if (!nesterov || (momentum > 0 && dampening == 0)) return;
  faults->Add(path, "expected a momentum above 0 and no dampening with it");
}

void ResolveParameters(const Known& known, bool bf16_states,
                       proto::OptimizerParams* params, Faults* faults) {
  const std::string path = "optimizer.params";
  CheckParameters(*params, path, known, faults);
  if (bf16_states && !params->has_state_dtype() && WhyFloat32(known).empty()) {
    params->set_state_dtype("bf16");
  }
  FillParameters(known, params);
  // An empty list in a file is no request for the defaults.
  if (params->betas_size() == 0 && !faults->IsWritten(path + ".betas")) {
    for (const double beta : known.betas) params->add_betas(beta);
  }
  if (!known.betas.empty()) {
    CheckBetas(path + ".betas", known, params->betas(), faults);
  }
  CheckStates(known, *params, path, faults);
  if (params->min_coeff() > params->max_coeff()) {
    faults->Add(path + ".min_coeff", "expected at most max_coeff, ",
                params->max_coeff(), ", got ", params->min_coeff());
  }
  if (Is(kMuon, known) || Is(kCustom, known)) return;
  CheckNesterov(path + ".nesterov", params->nesterov(), params->momentum(),
                params->dampening(), faults);
}

bool IsReserved(const std::string& group) {
  return group == "default" || group == "no_decay" || group == "muon";
}

void ResolveGroup(int number, const Known& known, proto::Optimizer* optimizer,
                  Faults* faults) {
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
  CheckParameters(params, inside, known, faults);
  if (params.betas_size() != 0) {
    CheckBetas(inside + ".betas", known, params.betas(), faults);
  }
  if (group.use_muon() && !Is(kMuon, known)) {
    faults->Add(path + ".use_muon", "expected false, of the optimizer ",
                known.type);
  }
  if (Is(kMuon, known) || Is(kCustom, known)) return;
  const proto::OptimizerParams& base = optimizer->params();
  const double momentum =
      params.has_momentum() ? params.momentum() : base.momentum();
  if ((momentum == 0) != (base.momentum() == 0)) {
    faults->Add(inside + ".momentum",
                "expected 0 for all groups or for none: with a momentum there "
                "are other states");
  }
  CheckNesterov(
      inside + ".nesterov",
      params.has_nesterov() ? params.nesterov() : base.nesterov(), momentum,
      params.has_dampening() ? params.dampening() : base.dampening(), faults);
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
  std::vector<std::string> known;
  Append(kDeepSpeed, &known);
  known.push_back(kScheduleFree);
  known.push_back(kCustom);
  std::string type = Find(known, optimizer.type(), SameInAnyCase);
  Append(kTorch, &known);
  if (type.empty()) type = Find(known, optimizer.type(), Same);
  if (!optimizer.has_type()) {
    faults->Add("optimizer.type", "missing: expected Adam, AdamW or another");
  } else if (type.empty()) {
    faults->AddUnknown(
        "optimizer.type", optimizer.type(),
        "Adam, AdamW, or another optimizer of DeepSpeed or torch.optim",
        OptimizerNames(), known);
  } else {
    optimizer.set_type(type);
    if (type == "OneBitAdam" || type == "OneBitLamb" || type == "ZeroOneAdam") {
      faults->Note("optimizer.type", type,
                   ": DeepSpeed 0.19.8 has removed it: use AdamW");
    }
    const Known* const ours = FindKnown(type);
    if (ours == nullptr) return;
    ResolveParameters(*ours, bf16_states, optimizer.mutable_params(), faults);
    for (int i = 0; i < optimizer.param_groups_size(); ++i) {
      ResolveGroup(i, *ours, &optimizer, faults);
    }
    if (!optimizer.has_no_decay()) optimizer.set_no_decay("off");
    CheckExact(*config, faults);
    return;
  }
  ResolveParameters(*FindKnown("AdamW"), bf16_states,
                    optimizer.mutable_params(), faults);
}

bool IsOptimizer(absl::string_view type) {
  return FindKnown(std::string(type)) != nullptr;
}

std::vector<std::string> OptimizerNames() {
  std::vector<std::string> names;
  for (const Known& known : KnownOptimizers()) names.push_back(known.type);
  return names;
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
