// Roles of modules (FindRoles), parameters and what cannot be sharded (Collect,
// Check...), modules that are units (FindUnits), parameters into units
// (UnitBuilder).
//
// Why parameters of one storage stay in one unit: a unit is gathered and freed
// by giving storages memory and taking it away. Two units over one storage
// would take each other's values, and whichever was freed first would take the
// memory of the other.
//
// Why nothing but the module's structure decides: every rank plans for itself
// and sends nothing. What differs between ranks (addresses, values, what
// requires a gradient) must not lead to other units, for ranks then gather
// different sizes.
#include "sharding/partition/partition.h"

#include <algorithm>
#include <sstream>
#include <tuple>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "sharding/partition/module_walk.h"
#include "sharding/partition/names.h"
#include "sharding/partition/storage_groups.h"
#include "torch/nn/module.h"
#include "torch/nn/modules/batchnorm.h"
#include "torch/nn/modules/instancenorm.h"
#include "torch/nn/modules/normalization.h"

namespace tessera {
namespace {

namespace nn = torch::nn;

// As users know it, for messages.
constexpr char kIgnored[] = "sharding.ignored_parameters";

// What the options say of a module and so of all that is below it; except
// `wanted`, which is of itself only.
struct Role {
  bool ignored = false;
  bool keep_fp32 = false;
  bool below_leaf = false;
  bool leaf = false;  // it, or one above it
  bool wanted = false;
};

template <typename... Types>
bool IsAnyOf(const nn::Module& module) {
  return ((dynamic_cast<const Types*>(&module) != nullptr) || ...);
}

bool IsNorm(const nn::Module& module) {
  return IsAnyOf<nn::LayerNormImpl, nn::GroupNormImpl, nn::BatchNorm1dImpl,
                 nn::BatchNorm2dImpl, nn::BatchNorm3dImpl,
                 nn::InstanceNorm1dImpl, nn::InstanceNorm2dImpl,
                 nn::InstanceNorm3dImpl>(module);
}

absl::StatusOr<std::vector<Role>> FindRoles(const ModuleWalk& walk,
                                            const PartitionOptions& options,
                                            PathPatterns* ignored) {
  ClassNames units("unit_classes", options.unit_classes);
  ClassNames leaves("leaf_classes", options.leaf_classes);
  ClassNames fp32("fp32_classes", options.fp32_classes);
  absl::flat_hash_set<std::string> classes;
  std::vector<Role> roles;
  roles.reserve(walk.modules.size());
  for (const auto& m : walk.modules) {
    Role role = m.parent < 0 ? Role{} : roles[m.parent];
    const std::string& name = m.module->name();
    classes.insert(name);
    if (m.parent >= 0 && ignored->Match(m.path)) role.ignored = true;
    if (fp32.Match(name)) role.keep_fp32 = true;
    if (options.keep_norms_fp32 && IsNorm(*m.module)) role.keep_fp32 = true;
    role.below_leaf = role.leaf;
    if (leaves.Match(name)) role.leaf = true;
    if (options.is_leaf && options.is_leaf(*m.module, m.path)) role.leaf = true;
    role.wanted = units.Match(name);
    if (options.is_unit && options.is_unit(*m.module, m.path)) {
      role.wanted = true;
    }
    roles.push_back(role);
  }
  TESSERA_RETURN_IF_ERROR(units.CheckMatched(classes));
  TESSERA_RETURN_IF_ERROR(leaves.CheckMatched(classes));
  TESSERA_RETURN_IF_ERROR(fp32.CheckMatched(classes));
  return roles;
}

// Each parameter once.
struct Chosen {
  std::vector<NamedParameter> planned;
  std::vector<int> module_of;  // of each planned one, in the walk
  std::vector<NamedParameter> ignored;
  std::vector<bool> has_planned;  // of each module, in it or below it
};

Chosen Collect(const ModuleWalk& walk, const std::vector<Role>& roles,
               PathPatterns* patterns) {
  std::vector<int> place_of;  // of each name, its tensor's first
  std::vector<bool> ignored(walk.parameters.size(), false);
  std::vector<bool> keep_fp32(walk.parameters.size(), false);
  absl::flat_hash_map<const void*, int> first_name;
  for (size_t i = 0; i < walk.parameters.size(); ++i) {
    const auto& p = walk.parameters[i];
    const int place =
        first_name.try_emplace(p.tensor.unsafeGetTensorImpl(), i).first->second;
    place_of.push_back(place);
    if (patterns->Match(p.name)) ignored[place] = true;
    if (roles[p.module].ignored) ignored[place] = true;
    if (roles[p.module].keep_fp32) keep_fp32[place] = true;
  }
  Chosen out;
  out.has_planned.resize(walk.modules.size(), false);
  for (size_t i = 0; i < walk.parameters.size(); ++i) {
    const auto& p = walk.parameters[i];
    const size_t place = place_of[i];
    if (p.tensor.numel() == 0) continue;
    if (!ignored[place]) out.has_planned[p.module] = true;
    if (place != i) continue;
    auto& list = ignored[i] ? out.ignored : out.planned;
    list.push_back(
        {p.name, p.tensor, static_cast<int>(list.size()), keep_fp32[i]});
    if (!ignored[i]) out.module_of.push_back(p.module);
  }
  for (size_t m = walk.modules.size(); m-- > 1;) {
    if (out.has_planned[m]) out.has_planned[walk.modules[m].parent] = true;
  }
  return out;
}

bool IsTorchs(const nn::Module& module) {
  return absl::StartsWith(module.name(), "torch::nn::");
}

// Name of the type whose instances are units, or "". Depth alone would not do:
// a norm before the head lies less deep than the blocks of a list, each of
// which holds norms of the same type. So a type of which an instance lies in
// one of another repeated type counts only where there is no other.
std::string RepeatedType(const ModuleWalk& walk, const std::vector<Role>& roles,
                         const std::vector<bool>& has_planned, bool torchs) {
  struct Seen {
    absl::flat_hash_set<const nn::Module*> instances;
    std::tuple<bool, int, size_t> place;  // within another, depth, index
  };
  absl::flat_hash_map<std::string, Seen> types;
  const auto counts = [&](size_t i) {
    return i > 0 && !roles[i].below_leaf && has_planned[i] &&
           IsTorchs(*walk.modules[i].module) == torchs;
  };
  for (size_t i = 1; i < walk.modules.size(); ++i) {
    if (!counts(i)) continue;
    const auto& m = walk.modules[i];
    const auto here = std::make_tuple(false, m.depth, i);
    Seen& seen =
        types.try_emplace(m.module->name(), Seen{{}, here}).first->second;
    seen.instances.insert(m.module);
    seen.place = std::min(seen.place, here);
  }
  const auto repeated = [](const Seen& seen) {
    return seen.instances.size() > 1;
  };
  for (size_t i = 1; i < walk.modules.size(); ++i) {
    if (!counts(i)) continue;
    const std::string& type = walk.modules[i].module->name();
    for (int m = walk.modules[i].parent; m > 0; m = walk.modules[m].parent) {
      const std::string& above = walk.modules[m].module->name();
      if (counts(m) && above != type && repeated(types[above])) {
        std::get<0>(types[type].place) = true;
      }
    }
  }
  const std::pair<const std::string, Seen>* best = nullptr;
  for (const auto& type : types) {
    if (!repeated(type.second)) continue;
    if (best == nullptr || type.second.place < best->second.place) {
      best = &type;
    }
  }
  return best == nullptr ? "" : best->first;
}

// Returns for each module the nearest module at or above it that is a unit; -1
// for none.
std::vector<int> FindUnits(const ModuleWalk& walk,
                           const std::vector<Role>& roles,
                           const std::vector<bool>& has_planned,
                           const PartitionOptions& options) {
  std::string type;
  if (options.unit_classes.empty() && !options.is_unit) {
    type = RepeatedType(walk, roles, has_planned, /*torchs=*/false);
    if (type.empty()) {
      type = RepeatedType(walk, roles, has_planned, /*torchs=*/true);
    }
  }
  std::vector<int> unit_of(walk.modules.size(), -1);
  for (size_t i = 0; i < walk.modules.size(); ++i) {
    const auto& m = walk.modules[i];
    const int above = m.parent < 0 ? -1 : unit_of[m.parent];
    const bool automatic =
        m.parent >= 0 && above < 0 && m.module->name() == type;
    const bool is_unit = roles[i].leaf || roles[i].wanted || automatic;
    unit_of[i] = is_unit && !roles[i].below_leaf ? static_cast<int>(i) : above;
  }
  return unit_of;
}

bool IsTrainableDtype(at::ScalarType dtype) {
  switch (dtype) {
    case at::kHalf:
    case at::kBFloat16:
    case at::kFloat:
    case at::kDouble:
    case at::kComplexFloat:
    case at::kComplexDouble:
      return true;
    default:
      return false;
  }
}

absl::Status CheckSupported(const NamedParameter& p, at::Device device) {
  std::ostringstream what;
  const at::Tensor& t = p.tensor;
  if (t.layout() != at::kStrided) {
    what << "layout " << t.layout() << "; expected strided";
  } else if (t.requires_grad() && !IsTrainableDtype(t.scalar_type())) {
    what << "dtype " << t.scalar_type()
         << " and requires a gradient; expected float16, bfloat16, float32, "
            "float64, complex64 or complex128, or requires_grad_(false)";
  } else if (!t.is_non_overlapping_and_dense()) {
    what << "strides " << t.strides() << " for sizes " << t.sizes()
         << "; expected dense memory";
  } else if (t.device() != device) {
    what << "device " << t.device() << "; expected " << device
         << ", where the first parameter is";
  } else if (t.is_meta()) {
    what << "device meta and so no memory; build the module on another";
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
  return absl::InvalidArgumentError(
      absl::StrCat("parameter '", p.name, "' cannot be sharded: it has ",
                   what.str(), "; or name it in sharding.ignored_parameters"));
}

// One of a storage cannot be left outside alone: its memory goes too.
absl::Status CheckIgnored(const Chosen& parameters) {
  absl::flat_hash_map<const void*, const NamedParameter*> planned;
  for (const auto& p : parameters.planned) {
    planned.try_emplace(p.tensor.storage().unsafeGetStorageImpl(), &p);
  }
  for (const auto& p : parameters.ignored) {
    if (!p.tensor.has_storage()) continue;
    const auto it = planned.find(p.tensor.storage().unsafeGetStorageImpl());
    if (it == planned.end()) continue;
    return absl::InvalidArgumentError(absl::StrCat(
        kIgnored, ": '", p.name, "' lies in one storage with '",
        it->second->name,
        "', which is not ignored; ignore both, or give one of them memory of "
        "its own (clone)"));
  }
  return absl::OkStatus();
}

// Opens units and says into which one parameters go, as they come in order of
// registration.
class UnitBuilder {
 public:
  UnitBuilder(const ModuleWalk& walk, const std::vector<Role>& roles,
              int64_t max_numel)
      : walk_(walk),
        roles_(roles),
        max_numel_(max_numel),
        open_(walk.modules.size(), -1) {}

  // The place in units() of `numel` elements of module `owner`'s unit (-1: of
  // none), the first of them in parameter `first`.
  int Place(int owner, int64_t numel, const std::string& first) {
    int& open = owner < 0 ? open_run_ : open_[owner];
    if (owner >= 0) open_run_ = -1;
    const bool leaf = owner >= 0 && roles_[owner].leaf;
    if (open >= 0 && (leaf || numel_[open] + numel <= max_numel_)) {
      numel_[open] += numel;
      return open;
    }
    const bool named = owner > 0 && open < 0;
    open = static_cast<int>(units_.size());
    units_.push_back(
        {names_.Take(named ? walk_.modules[owner].path : first), {}});
    numel_.push_back(numel);
    return open;
  }

  std::vector<UnitPlan>& units() { return units_; }

 private:
  const ModuleWalk& walk_;
  const std::vector<Role>& roles_;
  const int64_t max_numel_;
  std::vector<int> open_;  // the last unit of each module
  int open_run_ = -1;
  std::vector<UnitPlan> units_;
  std::vector<int64_t> numel_;  // of each unit
  DistinctNames names_;
};

}  // namespace

absl::StatusOr<Partition> PlanUnits(const nn::Module& module,
                                    const PartitionOptions& options) {
  const ModuleWalk walk = WalkModule(module);
  PathPatterns patterns(kIgnored, options.ignored);
  TESSERA_ASSIGN_OR_RETURN(const std::vector<Role> roles,
                           FindRoles(walk, options, &patterns));
  Chosen parameters = Collect(walk, roles, &patterns);
  std::vector<std::string> paths;
  for (const auto& p : walk.parameters) paths.push_back(p.name);
  for (const auto& m : walk.modules) {
    if (!m.path.empty()) paths.push_back(m.path);
  }
  TESSERA_RETURN_IF_ERROR(patterns.CheckMatched(paths, true));
  for (const auto& p : parameters.planned) {
    TESSERA_RETURN_IF_ERROR(
        CheckSupported(p, parameters.planned[0].tensor.device()));
  }
  TESSERA_RETURN_IF_ERROR(CheckIgnored(parameters));
  const StorageGroups storages = GroupByStorage(parameters.planned);
  TESSERA_RETURN_IF_ERROR(CheckStorages(storages, parameters.planned));

  const std::vector<int> unit_of =
      FindUnits(walk, roles, parameters.has_planned, options);
  UnitBuilder builder(walk, roles, options.max_unit_numel);
  std::vector<int> place_of(storages.groups.size(), -1);
  for (size_t i = 0; i < parameters.planned.size(); ++i) {
    const int storage = storages.of[i];
    if (place_of[storage] < 0) {
      place_of[storage] = builder.Place(unit_of[parameters.module_of[i]],
                                        storages.groups[storage].numel,
                                        parameters.planned[i].name);
    }
    builder.units()[place_of[storage]].parameters.push_back(
        std::move(parameters.planned[i]));
  }
  return Partition{std::move(builder.units()), std::move(parameters.ignored)};
}

}  // namespace tessera
