// Why parameters of a unit may need several flats: one flat buffer has one
// dtype, one state (sharded or whole between uses) and one answer to whether
// gradients are reduced. A frozen parameter in the flat of trained ones would
// cost gradient and optimizer memory, and one of another dtype could not lie
// there at all.
//
// Why all ranks come to the same flats: they follow from the plan, dtypes and
// `trainable`, of which the caller has made sure that they are the same
// everywhere. Flats that differ would meet in collectives of different sizes.
#include "sharding/partition/flat_plan.h"

#include <tuple>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/status.h"
#include "c10/core/ScalarType.h"
#include "sharding/partition/names.h"
#include "sharding/partition/storage_groups.h"

namespace tessera {
namespace {

std::string DtypeName(at::ScalarType dtype) {
  return c10::getDtypeNames(dtype).first;
}

// All parameters of the units by their index, and of each its unit.
struct Parameters {
  std::vector<NamedParameter> all;
  std::vector<int> unit_of;
};

Parameters InOrder(absl::Span<const UnitPlan> units, size_t count) {
  Parameters out;
  out.all.resize(count);
  out.unit_of.resize(count, -1);
  for (size_t u = 0; u < units.size(); ++u) {
    for (const auto& p : units[u].parameters) {
      const auto index = static_cast<size_t>(p.index);
      TESSERA_CHECK(index < count && out.unit_of[index] < 0)
          << p.name << " has index " << p.index << " of " << count;
      out.all[index] = p;
      out.all[index].unit = units[u].name;
      out.unit_of[index] = static_cast<int>(u);
    }
  }
  return out;
}

// What keeps parameters in different flats. Persistent ones of all units go
// together.
struct Kind {
  int unit;  // -1 if persistent
  at::ScalarType dtype;
  at::ScalarType working_dtype;
  bool trainable;
  int part;

  auto Fields() const {
    return std::make_tuple(unit, dtype, working_dtype, trainable, part);
  }
  bool operator==(const Kind& other) const {
    return Fields() == other.Fields();
  }
  template <typename H>
  friend H AbslHashValue(H hash, const Kind& kind) {
    return H::combine(std::move(hash), kind.Fields());
  }
};

absl::StatusOr<Kind> KindOf(const StorageGroup& group,
                            const Parameters& parameters,
                            const std::vector<bool>& trainable,
                            const FlatOptions& options) {
  auto working_dtype = [&](const NamedParameter& p) {
    return options.working_dtype ? options.working_dtype(p)
                                 : p.tensor.scalar_type();
  };
  auto part = [&](const NamedParameter& p) {
    return options.part ? options.part(p) : 0;
  };
  const NamedParameter& first = parameters.all[group.members[0]];
  Kind kind{parameters.unit_of[group.members[0]], first.tensor.scalar_type(),
            working_dtype(first), false, part(first)};
  for (int i : group.members) {
    const NamedParameter& p = parameters.all[i];
    if (trainable[i]) kind.trainable = true;
    if (part(p) != kind.part) {
      return absl::InvalidArgumentError(absl::StrCat(
          "parameters '", first.name, "' and '", p.name,
          "' lie in one storage, but are stepped by optimizers that keep other "
          "states; put them into one group, or give one of them memory of its "
          "own (clone)"));
    }
    if (working_dtype(p) == kind.working_dtype) continue;
    return absl::InvalidArgumentError(absl::StrCat(
        "parameters '", first.name, "' and '", p.name,
        "' lie in one storage, but the model is to compute with ",
        DtypeName(kind.working_dtype), " and ", DtypeName(working_dtype(p)),
        "; keep both in float32 or neither, or give one of them memory of its "
        "own (clone)"));
  }
  return kind;
}

// Names the flats; unit_of[f] is the unit of flat f's first parameter.
void NameFlats(absl::Span<const UnitPlan> units, absl::Span<const int> unit_of,
               std::vector<FlatPlan>* flats) {
  std::vector<const FlatPlan*> first_of(units.size(), nullptr);
  std::vector<bool> any_trainable(units.size(), false);
  for (size_t f = 0; f < flats->size(); ++f) {
    const int unit = unit_of[f];
    if (first_of[unit] == nullptr) first_of[unit] = &(*flats)[f];
    if ((*flats)[f].trainable) any_trainable[unit] = true;
  }
  DistinctNames names;
  for (size_t f = 0; f < flats->size(); ++f) {
    FlatPlan& flat = (*flats)[f];
    const int unit = unit_of[f];
    flat.unit = units[unit].name;
    std::string name = flat.unit;
    if (!flat.trainable && any_trainable[unit]) {
      absl::StrAppend(&name, " (frozen)");
    }
    if (flat.working_dtype != first_of[unit]->working_dtype) {
      absl::StrAppend(&name, " (", DtypeName(flat.working_dtype), ")");
    }
    if (flat.persistent) {
      const bool of_others = std::any_of(
          flat.parameters.begin(), flat.parameters.end(),
          [&](const NamedParameter& p) { return p.unit != flat.unit; });
      absl::StrAppend(&name, of_others ? " and other small parameters" : "",
                      " (kept whole)");
    }
    flat.name = names.Take(name);
  }
}

}  // namespace

absl::StatusOr<std::vector<FlatPlan>> SplitFlats(
    absl::Span<const UnitPlan> units, const std::vector<bool>& trainable,
    const FlatOptions& options) {
  Parameters parameters = InOrder(units, trainable.size());
  const StorageGroups storages = GroupByStorage(parameters.all);
  std::vector<FlatPlan> flats;
  std::vector<int64_t> numel;   // of each flat
  std::vector<int> unit_of;     // of each flat
  std::vector<size_t> flat_of;  // of each storage
  absl::flat_hash_map<Kind, size_t> open;
  int64_t persistent_numel = 0;
  for (const StorageGroup& group : storages.groups) {
    TESSERA_ASSIGN_OR_RETURN(Kind kind,
                             KindOf(group, parameters, trainable, options));
    const int unit = kind.unit;
    const bool persistent =
        options.sharded_parameters &&
        group.numel <= options.persistence_threshold &&
        group.numel <= options.model_persistence_threshold - persistent_numel;
    if (persistent) {
      kind.unit = -1;
      persistent_numel += group.numel;
    }
    auto [it, is_new] = open.try_emplace(kind, flats.size());
    if (!is_new && persistent &&
        numel[it->second] + group.numel > kMaxPersistentFlatNumel) {
      it->second = flats.size();
      is_new = true;
    }
    if (is_new) {
      FlatPlan flat;
      flat.dtype = kind.dtype;
      flat.working_dtype = kind.working_dtype;
      flat.trainable = kind.trainable;
      flat.persistent = persistent;
      flats.push_back(std::move(flat));
      numel.push_back(0);
      unit_of.push_back(unit);
    }
    numel[it->second] += group.numel;
    flat_of.push_back(it->second);
  }
  for (size_t i = 0; i < parameters.all.size(); ++i) {
    flats[flat_of[storages.of[i]]].parameters.push_back(
        std::move(parameters.all[i]));
  }
  NameFlats(units, unit_of, &flats);
  return flats;
}

}  // namespace tessera
