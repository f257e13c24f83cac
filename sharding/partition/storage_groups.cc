#include "sharding/partition/storage_groups.h"

#include <algorithm>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "c10/core/ScalarType.h"

namespace tessera {
namespace {

absl::Status CheckGroup(std::vector<const NamedParameter*> members) {
  const NamedParameter& first = *members[0];
  for (const NamedParameter* p : members) {
    if (p->tensor.scalar_type() == first.tensor.scalar_type()) continue;
    return absl::InvalidArgumentError(absl::StrCat(
        "parameters '", first.name, "' (",
        c10::getDtypeNames(first.tensor.scalar_type()).first, ") and '",
        p->name, "' (", c10::getDtypeNames(p->tensor.scalar_type()).first,
        ") lie in one storage; expected one dtype there; give one of them "
        "memory of its own (clone)"));
  }
  std::stable_sort(members.begin(), members.end(), [](auto* a, auto* b) {
    return a->tensor.storage_offset() < b->tensor.storage_offset();
  });
  for (size_t i = 1; i < members.size(); ++i) {
    const NamedParameter *a = members[i - 1], *b = members[i];
    if (a->tensor.storage_offset() + a->tensor.numel() <=
        b->tensor.storage_offset()) {
      continue;
    }
    if (a->index > b->index) std::swap(a, b);
    return absl::InvalidArgumentError(absl::StrCat(
        "parameters '", a->name, "' and '", b->name,
        "' overlap in memory but are not the same tensor; register one tensor "
        "under both names to tie them"));
  }
  return absl::OkStatus();
}

}  // namespace

StorageGroups GroupByStorage(absl::Span<const NamedParameter> parameters) {
  StorageGroups storages;
  absl::flat_hash_map<const void*, int> by_storage;
  for (size_t i = 0; i < parameters.size(); ++i) {
    const at::Tensor& t = parameters[i].tensor;
    const auto [it, is_new] =
        by_storage.try_emplace(t.storage().unsafeGetStorageImpl(),
                               static_cast<int>(storages.groups.size()));
    if (is_new) storages.groups.emplace_back();
    StorageGroup& group = storages.groups[it->second];
    group.members.push_back(static_cast<int>(i));
    const auto& part = parameters[i].part;
    group.numel +=
        part.has_value() && part->stands_in() ? part->WholeNumel() : t.numel();
    storages.of.push_back(it->second);
  }
  return storages;
}

absl::Status CheckStorages(const StorageGroups& storages,
                           absl::Span<const NamedParameter> parameters) {
  for (const StorageGroup& group : storages.groups) {
    if (group.members.size() == 1) continue;
    std::vector<const NamedParameter*> members;
    for (int i : group.members) members.push_back(&parameters[i]);
    TESSERA_RETURN_IF_ERROR(CheckGroup(std::move(members)));
  }
  return absl::OkStatus();
}

}  // namespace tessera
