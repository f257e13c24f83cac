#include <cmath>
#include <string>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "config/defaults.h"
#include "config/validate.h"

namespace tessera {
namespace {

void CheckBetas(const proto::AdamParams& params, Faults* faults) {
  constexpr char kPath[] = "optimizer.params.betas";
  if (params.betas_size() != 2) {
    faults->Add(kPath, "expected two numbers, got ", params.betas_size());
    return;
  }
  for (int i = 0; i < 2; ++i) {
    const double beta = params.betas(i);
    if (beta >= 0 && beta < 1) continue;
    faults->Add(absl::StrCat(kPath, "[", i, "]"),
                "expected at least 0 and less than 1, got ", beta);
  }
}

void ResolveAdam(proto::AdamParams* params, Faults* faults) {
  FillDefaults(params);
  // An empty list in a file is no request for the defaults.
  if (params->betas_size() == 0 &&
      !faults->IsWritten("optimizer.params.betas")) {
    params->add_betas(0.9);
    params->add_betas(0.999);
  }
  faults->CheckAtLeast0("optimizer.params.lr", params->lr());
  faults->CheckAtLeast0("optimizer.params.weight_decay",
                        params->weight_decay());
  faults->CheckAbove0("optimizer.params.eps", params->eps());
  CheckBetas(*params, faults);
  if (!params->adam_w_mode() && params->weight_decay() != 0) {
    faults->Add("optimizer.params.adam_w_mode",
                "false adds weight decay to the gradient (L2), which is not "
                "available in this version: write true, or \"weight_decay\": "
                "0");
  }
}

}  // namespace

void ResolveOptimizer(proto::Config* config, Faults* faults) {
  if (!config->has_optimizer()) return;
  proto::Optimizer& optimizer = *config->mutable_optimizer();
  const std::string type = optimizer.type();
  if (absl::EqualsIgnoreCase(type, "adam")) {
    optimizer.set_type("Adam");
  } else if (absl::EqualsIgnoreCase(type, "adamw")) {
    optimizer.set_type("AdamW");
  } else if (optimizer.has_type()) {
    faults->Add("optimizer.type", "expected Adam or AdamW, got '", type, "'");
  } else {
    faults->Add("optimizer.type", "missing: expected Adam or AdamW");
  }
  ResolveAdam(optimizer.mutable_params(), faults);
}

void ResolveGradients(proto::Config* config, Faults* faults) {
  FillDefaults(config);
  faults->CheckAtLeast0("gradient_clipping", config->gradient_clipping());
  const double p = config->gradient_clipping_norm();
  if (!(p > 0)) {
    faults->Add("gradient_clipping_norm",
                "expected a number above 0, or inf, got ", p);
  }
  faults->CheckAbove0("gradient_predivide_factor",
                      config->gradient_predivide_factor());
}

}  // namespace tessera
