#include "parallel/pipeline/staged_storages.h"

#include <algorithm>
#include <cstdlib>
#include <utility>

#include "base/torch/storage_access.h"
#include "c10/core/Allocator.h"

namespace tessera {
namespace {

constexpr char kNoData[] =
    "this tensor is computed by another stage of the pipeline, and its data "
    "was "
    "asked for here (an accessor, a raw pointer, an engine's parameter outside "
    "of Engine::TrainBatch and Engine::EvalBatch). A forward must not look at "
    "values that depend on weights or activations; what a loss or a result of "
    "Engine::EvalBatch is may be looked at once that call has returned it.";

}  // namespace

int StageSet::NearestTo(int stage, bool above) const {
  int nearest = -1;
  for (int one = 0; one <= kMaxStages; ++one) {
    if (!has(one)) continue;
    const bool fits = above ? one > stage : one < stage;
    const bool fitted =
        nearest >= 0 && (above ? nearest > stage : nearest < stage);
    if (nearest < 0 || (fits && !fitted) ||
        (fits == fitted && std::abs(one - stage) < std::abs(nearest - stage))) {
      nearest = one;
    }
  }
  return nearest;
}

void StagedStorages::AddParameter(const c10::Storage& storage, int home,
                                  std::string name) {
  Entry& entry = entries_[storage.unsafeGetStorageImpl()];
  entry.stages = StageSet::Of(home);
  entry.home = entry.made = home;
  entry.name = std::move(name);
  entry.storage = c10::weak_intrusive_ptr<c10::StorageImpl>(
      c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(
          storage.unsafeGetStorageImpl()));
}

void StagedStorages::SetStage(c10::StorageImpl* storage, int stage,
                              bool outside, int64_t order) {
  const auto [at, added] = entries_.try_emplace(storage);
  Entry& entry = at->second;
  entry.stages = StageSet::Of(stage);
  entry.made = stage;
  if (!added) return;
  entry.outside = outside;
  entry.order = order;
  entry.storage = c10::weak_intrusive_ptr<c10::StorageImpl>(
      c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(storage));
}

void StagedStorages::AddStage(const c10::StorageImpl* storage, int stage) {
  const auto found = entries_.find(storage);
  if (found != entries_.end()) found->second.stages.Add(stage);
}

void StagedStorages::SetOwn(const c10::StorageImpl* storage) {
  const auto found = entries_.find(storage);
  if (found != entries_.end()) found->second.own = true;
}

void StagedStorages::SetEverywhere(const c10::StorageImpl* storage) {
  entries_.erase(storage);
}

void StagedStorages::Sweep() {
  absl::erase_if(entries_, [](const auto& item) {
    return item.second.home < 0 && item.second.storage.expired();
  });
}

std::vector<StagedStorages::Written> StagedStorages::Outside() const {
  std::vector<Written> outside;
  for (const auto& [storage, entry] : entries_) {
    if (!entry.outside) continue;
    if (auto alive = entry.storage.lock()) {
      outside.push_back({c10::Storage(alive), entry.order});
    }
  }
  std::sort(
      outside.begin(), outside.end(),
      [](const Written& a, const Written& b) { return a.order < b.order; });
  return outside;
}

std::vector<c10::Storage> StagedStorages::TakeSentParameters(int stage) {
  std::vector<c10::Storage> sent;
  for (auto& [storage, entry] : entries_) {
    if (entry.home < 0) continue;
    const bool here = entry.stages.has(stage) && entry.home != stage;
    entry.stages = StageSet::Of(entry.home);
    if (!here) continue;
    if (auto alive = entry.storage.lock()) sent.emplace_back(alive);
  }
  return sent;
}

c10::Storage AbsentStorage(size_t bytes, at::Device device) {
  c10::Storage storage(c10::Storage::use_byte_size_t(), bytes,
                       c10::DataPtr(nullptr, device),
                       c10::GetAllocator(device.type()), /*resizable=*/true);
  HideStorageSaying(storage.unsafeGetStorageImpl(), kNoData);
  return storage;
}

void TakeMemory(c10::StorageImpl* storage) {
  storage->set_data_ptr_noswap(c10::DataPtr(nullptr, storage->device()));
  HideStorageSaying(storage, kNoData);
}

void GiveMemory(c10::StorageImpl* storage) {
  c10::Allocator* const allocator =
      storage->allocator() != nullptr
          ? storage->allocator()
          : c10::GetAllocator(storage->device().type());
  storage->set_data_ptr_noswap(allocator->allocate(storage->nbytes()));
  ShowStorage(storage);
}

}  // namespace tessera
