#include "sharding/partition.h"

#include <algorithm>
#include <map>
#include <sstream>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "base/status.h"
#include "torch/nn/module.h"

namespace tessera {
namespace {

using torch::nn::Module;

// A parameter and the module whose unit it belongs to ("" for none).
struct Item {
  std::string unit;
  NamedParameter parameter;
};

struct Found {
  std::string path;
  const Module* module;
  int depth;
};

void Walk(const Module& module, const std::string& path, int depth,
          std::vector<Found>* out) {
  out->push_back({path, &module, depth});
  for (const auto& child : module.named_children()) {
    Walk(*child.value(),
         path.empty() ? child.key() : absl::StrCat(path, ".", child.key()),
         depth + 1, out);
  }
}

bool IsTorchs(const Module& module) {
  return absl::StartsWith(module.name(), "torch::nn::");
}

// Names of the type whose instances are units, or "".
std::string RepeatedType(const std::vector<Found>& modules, bool torchs) {
  struct Seen {
    absl::flat_hash_set<const Module*> instances;
    int depth = 0;
    size_t order = 0;
  };
  std::map<std::string, Seen> types;
  for (size_t i = 0; i < modules.size(); ++i) {
    const Found& f = modules[i];
    if (f.depth == 0 || IsTorchs(*f.module) != torchs) continue;
    if (f.module->parameters().empty()) continue;
    Seen& seen = types[f.module->name()];
    if (seen.instances.empty()) {
      seen.depth = f.depth;
      seen.order = i;
    }
    seen.depth = std::min(seen.depth, f.depth);
    seen.instances.insert(f.module);
  }
  const std::pair<const std::string, Seen>* best = nullptr;
  for (const auto& type : types) {
    if (type.second.instances.size() < 2) continue;
    if (best == nullptr ||
        std::make_pair(type.second.depth, type.second.order) <
            std::make_pair(best->second.depth, best->second.order)) {
      best = &type;
    }
  }
  return best == nullptr ? "" : best->first;
}

// Paths of the outermost instances of the type.
std::vector<std::string> UnitPaths(const std::vector<Found>& modules,
                                   const std::string& type) {
  std::vector<std::string> paths;
  for (const Found& f : modules) {
    if (type.empty() || f.depth == 0 || f.module->name() != type) continue;
    const bool nested =
        std::any_of(paths.begin(), paths.end(), [&](const std::string& p) {
          return absl::StartsWith(f.path, absl::StrCat(p, "."));
        });
    if (!nested) paths.push_back(f.path);
  }
  return paths;
}

absl::Status CheckSupported(const NamedParameter& p, at::Device device) {
  std::ostringstream what;
  const at::Tensor& t = p.tensor;
  if (t.layout() != at::kStrided) {
    what << "layout " << t.layout() << "; expected strided";
  } else if (t.scalar_type() != at::kFloat && t.scalar_type() != at::kDouble) {
    what << "dtype " << t.scalar_type() << "; expected float32 or float64";
  } else if (!t.is_non_overlapping_and_dense()) {
    what << "strides " << t.strides() << " for sizes " << t.sizes()
         << "; expected dense memory";
  } else if (t.device() != device) {
    what << "device " << t.device() << "; expected " << device
         << ", where the first parameter is";
  } else if (!t.is_leaf()) {
    what << "a history; expected a leaf";
  } else if (t.is_inference()) {
    what << "no version counter (it was made under c10::InferenceMode); build "
            "the module outside of it";
  } else if (t.is_neg() || t.is_conj()) {
    what << "a negative or conjugate bit; expected plain values (resolve_neg, "
            "resolve_conj)";
  } else {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrCat(
      "parameter '", p.name, "' cannot be sharded: it has ", what.str()));
}

absl::Status CheckOverlaps(const std::vector<Item>& items) {
  absl::flat_hash_map<const void*, std::vector<const NamedParameter*>> by;
  for (const auto& item : items) {
    const NamedParameter& p = item.parameter;
    auto& others = by[p.tensor.storage().unsafeGetStorageImpl()];
    for (const NamedParameter* o : others) {
      const int64_t a = p.tensor.storage_offset();
      const int64_t b = o->tensor.storage_offset();
      if (a < b + o->tensor.numel() && b < a + p.tensor.numel()) {
        return absl::InvalidArgumentError(absl::StrCat(
            "parameters '", o->name, "' and '", p.name,
            "' overlap in memory but are not the same tensor; register one "
            "tensor under both names to tie them"));
      }
    }
    others.push_back(&p);
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<Item>> Collect(
    const Module& module, const std::vector<std::string>& unit_paths) {
  std::vector<Item> items;
  absl::flat_hash_set<const void*> seen;
  absl::flat_hash_map<const void*, std::string> unit_of_storage;
  for (const auto& entry : module.named_parameters(/*recurse=*/true)) {
    const at::Tensor& t = entry.value();
    if (!t.defined() || t.numel() == 0) continue;
    if (!seen.insert(t.unsafeGetTensorImpl()).second) continue;  // tied
    Item item{"", {entry.key(), t}};
    for (const auto& path : unit_paths) {
      if (absl::StartsWith(entry.key(), absl::StrCat(path, "."))) {
        item.unit = path;
      }
    }
    TESSERA_RETURN_IF_ERROR(CheckSupported(
        item.parameter,
        items.empty() ? t.device() : items[0].parameter.tensor.device()));
    // One storage, one unit: the first parameter over it decides.
    auto [it, first] = unit_of_storage.try_emplace(
        t.storage().unsafeGetStorageImpl(), item.unit);
    if (!first) item.unit = it->second;
    items.push_back(std::move(item));
  }
  TESSERA_RETURN_IF_ERROR(CheckOverlaps(items));
  return items;
}

// True if a cut before `next` would part two parameters of one storage.
bool SharesStorage(const UnitPlan& unit, const NamedParameter& next) {
  return std::any_of(unit.parameters.begin(), unit.parameters.end(),
                     [&](const NamedParameter& p) {
                       return p.tensor.storage().unsafeGetStorageImpl() ==
                              next.tensor.storage().unsafeGetStorageImpl();
                     });
}

}  // namespace

absl::StatusOr<std::vector<UnitPlan>> PlanUnits(const Module& module,
                                                int64_t max_unit_numel) {
  std::vector<Found> modules;
  Walk(module, "", 0, &modules);
  std::string type = RepeatedType(modules, /*torchs=*/false);
  if (type.empty()) type = RepeatedType(modules, /*torchs=*/true);
  TESSERA_ASSIGN_OR_RETURN(std::vector<Item> items,
                           Collect(module, UnitPaths(modules, type)));
  std::vector<UnitPlan> plans;
  std::string open_unit;
  int64_t numel = 0;
  for (auto& item : items) {
    const NamedParameter& p = item.parameter;
    UnitPlan* open = plans.empty() ? nullptr : &plans.back();
    // A storage met before stays with its unit, wherever that is.
    auto home = std::find_if(
        plans.begin(), plans.end(),
        [&](const UnitPlan& plan) { return SharesStorage(plan, p); });
    if (home != plans.end()) {
      home->parameters.push_back(std::move(item.parameter));
      continue;
    }
    const bool cut =
        open == nullptr || item.unit != open_unit ||
        p.tensor.scalar_type() != open->parameters[0].tensor.scalar_type() ||
        numel + p.tensor.numel() > max_unit_numel;
    if (cut) {
      const bool again = open != nullptr && item.unit == open_unit;
      plans.push_back({item.unit.empty() || again ? p.name : item.unit, {}});
      open_unit = item.unit;
      numel = 0;
    }
    numel += p.tensor.numel();
    plans.back().parameters.push_back(std::move(item.parameter));
  }
  return plans;
}

}  // namespace tessera
