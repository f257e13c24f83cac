#include "engine/build/recompute_choice.h"

#include <algorithm>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "base/status.h"
#include "parallel/tensor/placed.h"
#include "sharding/partition/module_walk.h"
#include "sharding/partition/names.h"
#include "torch/nn/module.h"

namespace tessera {
namespace {

constexpr char kOption[] = "activation_checkpointing.units";
constexpr int kNone = -1, kSeveral = -2;

// By module of the walk: "auto" means it.
std::vector<bool> RepeatedUnits(const ModuleWalk& walk,
                                absl::Span<const UnitPlan> units) {
  absl::flat_hash_set<std::string> names;
  for (const UnitPlan& unit : units) names.insert(unit.name);
  absl::flat_hash_map<std::string, int> of_class;
  for (const auto& m : walk.modules) {
    if (m.parent >= 0 && names.contains(m.path)) ++of_class[m.module->name()];
  }
  std::vector<bool> repeated;
  for (const auto& m : walk.modules) {
    repeated.push_back(m.parent >= 0 && names.contains(m.path) &&
                       of_class[m.module->name()] > 1);
  }
  return repeated;
}

// By module of the walk: the number of the outermost chosen one that it is, or
// is below; kNone.
absl::StatusOr<std::vector<int>> FindChosen(const ModuleWalk& walk,
                                            absl::Span<const UnitPlan> units,
                                            const RecomputeChoice& choice,
                                            RecomputedModules* found) {
  std::vector<std::string> classes;
  for (const std::string& name : choice.units) {
    if (name != "auto") classes.push_back(name);
  }
  std::vector<bool> automatic(walk.modules.size(), false);
  if (classes.size() < choice.units.size()) {
    automatic = RepeatedUnits(walk, units);
  }
  ClassNames names(kOption, classes);
  absl::flat_hash_set<std::string> present;
  std::vector<int> chosen;
  for (size_t i = 0; i < walk.modules.size(); ++i) {
    const auto& m = walk.modules[i];
    present.insert(m.module->name());
    const bool wanted =
        names.Match(m.module->name()) || automatic[i] ||
        (choice.is_recomputed && choice.is_recomputed(*m.module, m.path));
    int number = m.parent < 0 ? kNone : chosen[static_cast<size_t>(m.parent)];
    if (number == kNone && wanted) {
      number = static_cast<int>(found->modules.size());
      found->modules.push_back({m.path, {}});
    }
    chosen.push_back(number);
  }
  TESSERA_RETURN_IF_ERROR(names.CheckMatched(present));
  return chosen;
}

}  // namespace

absl::StatusOr<RecomputedModules> ChooseRecomputed(
    const torch::nn::Module& module, absl::Span<const UnitPlan> units,
    const RecomputeChoice& choice) {
  RecomputedModules found;
  const ModuleWalk walk = WalkModule(module);
  TESSERA_ASSIGN_OR_RETURN(const std::vector<int> chosen,
                           FindChosen(walk, units, choice, &found));
  // By storage, in order: where all of its parameters are.
  std::vector<at::Tensor> tensors;
  absl::flat_hash_map<const void*, int> of_storage;
  for (const auto& p : walk.parameters) {
    const at::Tensor& tensor = PartOrSelf(p.tensor);
    if (!tensor.has_storage()) continue;
    const int number = chosen[static_cast<size_t>(p.module)];
    const auto [it, is_new] =
        of_storage.try_emplace(tensor.storage().unsafeGetStorageImpl(), number);
    if (is_new) tensors.push_back(tensor);
    if (it->second != number) it->second = kSeveral;
  }
  for (const at::Tensor& t : tensors) {
    const int number = of_storage.at(t.storage().unsafeGetStorageImpl());
    if (number == kSeveral) {
      found.shared.push_back(t);
    } else if (number >= 0 && number % choice.every == 0) {
      found.modules[static_cast<size_t>(number)].parameters.push_back(t);
    }
  }
  found.modules.erase(
      std::remove_if(found.modules.begin(), found.modules.end(),
                     [](const auto& m) { return m.parameters.empty(); }),
      found.modules.end());
  return found;
}

}  // namespace tessera
