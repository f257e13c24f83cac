#include <iterator>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
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
constexpr const char* kTorch[] = {
    "Adadelta", "Adafactor", "Adamax", "ASGD", "LBFGS",     "NAdam",
    "RAdam",    "RMSprop",   "Rprop",  "SGD",  "SparseAdam"};
constexpr int kLastOfAdam = 10;  // OptimizerParams' fields of Adam and AdamW

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

void CheckOnlyAdams(const proto::OptimizerParams& params,
                    const std::string& type, Faults* faults) {
  std::vector<const FieldDescriptor*> fields;
  params.GetReflection()->ListFields(params, &fields);
  for (const FieldDescriptor* field : fields) {
    if (field->number() <= kLastOfAdam ||
        field->options().HasExtension(proto::no_effect)) {
      continue;
    }
    faults->Add(absl::StrCat("optimizer.params.", field->name()), "'", type,
                "' has no such parameter");
  }
}

void ResolveAdam(proto::OptimizerParams* params, Faults* faults) {
  FillDefaults(params);
  // An empty list in a file is no request for the defaults.
  if (params->betas_size() == 0 &&
      !faults->IsWritten("optimizer.params.betas")) {
    params->add_betas(0.9);
    params->add_betas(0.999);
  }
  if (params->betas_size() != 2) {
    faults->Add("optimizer.params.betas", "expected two numbers, got ",
                params->betas_size());
  }
}

}  // namespace

void ResolveOptimizer(proto::Config* config, Faults* faults) {
  // {} is as if absent, as in DeepSpeed.
  if (config->optimizer().ByteSizeLong() == 0) config->clear_optimizer();
  if (!config->has_optimizer()) return;
  proto::Optimizer& optimizer = *config->mutable_optimizer();
  std::vector<std::string> known;
  Append(kDeepSpeed, &known);
  std::string type = Find(known, optimizer.type(), SameInAnyCase);
  Append(kTorch, &known);
  if (type.empty()) type = Find(known, optimizer.type(), Same);
  if (!optimizer.has_type()) {
    faults->Add("optimizer.type", "missing: expected Adam, AdamW or another");
  } else if (type.empty()) {
    faults->AddUnknown(
        "optimizer.type", optimizer.type(),
        "Adam, AdamW, or another optimizer of DeepSpeed or torch.optim", known);
  } else {
    optimizer.set_type(type);
    if (type == "OneBitAdam" || type == "OneBitLamb" || type == "ZeroOneAdam") {
      faults->Note("optimizer.type", type,
                   ": DeepSpeed 0.19.8 has removed it: use AdamW");
    }
    if (type != "Adam" && type != "AdamW") return;
    CheckOnlyAdams(optimizer.params(), type, faults);
  }
  ResolveAdam(optimizer.mutable_params(), faults);
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
