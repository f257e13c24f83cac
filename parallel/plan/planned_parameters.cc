#include "parallel/plan/planned_parameters.h"

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "base/above/above_autograd.h"
#include "torch/nn/module.h"

namespace tessera {
namespace {

std::string WhyWhole(const at::Tensor& t) {
  if (!t.is_floating_point()) return "is not of floating-point numbers";
  if (t.layout() != at::kStrided || !t.has_storage()) return "is not dense";
  if (!t.is_leaf()) return "is computed from others";
  if (t.key_set().has(kAboveKey)) return "is divided already";
  return "";
}

}  // namespace

std::vector<PlannedParameter> PlannedParameters(
    const torch::nn::Module& module) {
  std::vector<PlannedParameter> parameters;
  absl::flat_hash_set<const c10::TensorImpl*> seen;
  absl::flat_hash_map<const c10::StorageImpl*, int> users;
  for (const auto& item : module.named_parameters()) {
    const at::Tensor& t = item.value();
    if (!t.defined() || !seen.insert(t.unsafeGetTensorImpl()).second) continue;
    parameters.push_back({item.key(), t, WhyWhole(t)});
    if (t.has_storage()) ++users[t.storage().unsafeGetStorageImpl()];
  }
  for (PlannedParameter& each : parameters) {
    if (!each.stays_whole.empty()) continue;
    if (users[each.tensor.storage().unsafeGetStorageImpl()] > 1) {
      each.stays_whole = "shares memory with another parameter";
    }
  }
  return parameters;
}

bool CanDivide(const PlannedParameter& parameter,
               const TensorPlacement& placement, int ranks) {
  const auto [kind, dim, groups] = placement;
  return parameter.stays_whole.empty() && dim < parameter.tensor.dim() &&
         parameter.tensor.size(dim) > 0 &&
         parameter.tensor.size(dim) % (groups * ranks) == 0;
}

absl::string_view OwnerOf(absl::string_view parameter) {
  const size_t dot = parameter.rfind('.');
  return dot == absl::string_view::npos ? absl::string_view()
                                        : parameter.substr(0, dot);
}

std::string WithoutNumbers(absl::string_view name, bool owners) {
  std::vector<std::string> path = absl::StrSplit(name, '.');
  for (size_t i = 0; i + 1 < path.size(); ++i) {
    const size_t end = path[i].find_last_not_of("0123456789");
    const bool number = end == std::string::npos;
    if (i + 2 >= path.size() && !(number && owners)) continue;
    if (!number && end + 1 == path[i].size()) continue;
    path[i] = absl::StrCat(number ? "" : path[i].substr(0, end + 1), "*");
  }
  return absl::StrJoin(path, ".");
}

}  // namespace tessera
