#include "offload/activation_store.h"

#include <algorithm>
#include <iterator>
#include <optional>

#include "ATen/core/Tensor.h"
#include "ATen/ops/empty.h"
#include "base/status.h"
#include "base/stream/side_stream.h"
#include "base/stream/stream_point.h"
#include "base/stream/stream_uses.h"
#include "base/torch/torch_scope.h"
#include "base/torch_guard.h"
#include "c10/core/StreamGuard.h"
#include "offload/tier_room.h"

namespace tessera {
namespace {

int64_t BytesOf(const c10::Storage& storage) {
  return static_cast<int64_t>(storage.nbytes());
}

}  // namespace

// What is not const is guarded by the store's mutex.
class ActivationStore::Entry {
 public:
  Entry(std::shared_ptr<ActivationStore> store, int64_t group,
        at::Device device, int64_t bytes, std::string what)
      : store(std::move(store)),
        group(group),
        device(device),
        bytes(bytes),
        what(std::move(what)) {
    this->store->gone_ += bytes;
  }
  ~Entry() {
    (void)under_way.Wait();  // it uses `memory` and `room`
    store->gone_ -= bytes;
  }

  const std::shared_ptr<ActivationStore> store;
  const int64_t group;
  const at::Device device;
  const int64_t bytes;
  const std::string what;
  TierRoom room;
  SwapFuture under_way;
  absl::Status status;  // of what was written
  // What is being written, or has come back and has not been asked for.
  c10::Storage memory;
  bool is_out = false;  // it is not the first of the two any more
  bool asked = false;
  // What has come back and was given away, if somebody has it.
  std::optional<c10::weak_intrusive_ptr<c10::StorageImpl>> given;
  StreamPoint out, back;  // of a device: it is there; it is in `memory`
};

std::shared_ptr<ActivationStore> ActivationStore::Create(
    std::shared_ptr<SwapFile> disk, int64_t least_bytes) {
  return std::shared_ptr<ActivationStore>(
      new ActivationStore(std::move(disk), least_bytes));
}

ActivationStore::Group ActivationStore::NewGroup() {
  absl::MutexLock lock(&mutex_);
  for (auto group = by_group_.begin(); group != by_group_.end();) {
    const Entries& entries = group->second;
    const bool over =
        std::all_of(entries.begin(), entries.end(),
                    [](const auto& entry) { return entry.expired(); });
    group = over ? by_group_.erase(group) : std::next(group);
  }
  return Group(shared_from_this(), groups_++);
}

bool ActivationStore::Takes(const c10::Storage& storage) const {
  return storage.device().is_cpu() == (disk_ != nullptr) &&
         BytesOf(storage) >= least_bytes_ &&
         !left_.contains(storage.unsafeGetStorageImpl());
}

absl::StatusOr<ActivationStore::Stored> ActivationStore::Group::Put(
    const c10::Storage& storage, int64_t used, int64_t version,
    const std::string& what) {
  if (!store_->Takes(storage)) return nullptr;
  for (const Known& known : known_) {
    if (known.storage._unsafe_get_target() == storage.unsafeGetStorageImpl() &&
        known.version == version) {
      return known.stored;
    }
  }
  if (used < BytesOf(storage) / kMostUnused) return nullptr;
  auto entry = std::make_shared<Entry>(store_, number_, storage.device(),
                                       BytesOf(storage), what);
  TESSERA_RETURN_IF_ERROR(CatchTorch(what, [&]() -> absl::Status {
    absl::MutexLock lock(&store_->mutex_);
    TESSERA_RETURN_IF_ERROR(store_->StartOut(entry.get(), storage));
    store_->leaving_.push_back(entry);
    store_->LimitOut();
    store_->by_group_[number_].push_back(entry);
    store_->stats_.bytes_out += entry->bytes;
    return absl::OkStatus();
  }));
  known_.push_back({storage.getWeakStorageImpl(), version, entry});
  return entry;
}

absl::Status ActivationStore::StartOut(Entry* entry,
                                       const c10::Storage& storage) {
  TorchScope scope;
  const auto state = std::make_shared<const TieredState>(TieredState{
      entry->bytes, at::kByte, entry->device, MemoryKind::kOther, entry->what});
  TESSERA_ASSIGN_OR_RETURN(entry->room, TierRoom::Allocate(state, disk_));
  if (disk_ != nullptr) {
    entry->memory = storage;
    entry->under_way =
        disk_->Write(entry->room.extent(), 0, entry->memory.data(),
                     entry->bytes, entry->what);
    return absl::OkStatus();
  }
  const at::Tensor from =
      at::empty({0}, at::TensorOptions(at::kByte).device(entry->device))
          .set_(storage, 0, {entry->bytes}, {1});
  const StreamPoint made = StreamPoint::Now(entry->device);
  const c10::StreamGuard side(SideStream(entry->device));
  made.Order();
  TESSERA_RETURN_IF_ERROR(entry->room.CopyFrom({0, entry->bytes}, from));
  KeepForCurrentStream(from);
  entry->out = StreamPoint::Now(entry->device);
  return absl::OkStatus();
}

void ActivationStore::EndOut(Entry* entry) {
  if (std::exchange(entry->is_out, true)) return;
  entry->status.Update(entry->under_way.Wait());
  entry->out.Order();
  entry->memory = c10::Storage();
}

// And lets go of what is there.
void ActivationStore::LimitOut() {
  while (!leaving_.empty()) {
    const Stored oldest = leaving_.front().lock();
    const bool waits = oldest != nullptr && !oldest->is_out &&
                       (disk_ == nullptr || !oldest->under_way.Done());
    if (waits && leaving_.size() <= kUnderWay) return;
    leaving_.pop_front();
    if (oldest != nullptr) EndOut(oldest.get());
  }
}

void ActivationStore::AwaitOut(const Stored& stored) {
  absl::MutexLock lock(&mutex_);
  EndOut(stored.get());
}

absl::Status ActivationStore::StartBack(Entry* entry) {
  TESSERA_RETURN_IF_ERROR(entry->status);
  if (entry->memory) return absl::OkStatus();
  TorchScope scope;
  const at::Tensor to = at::empty(
      {entry->bytes}, at::TensorOptions(at::kByte).device(entry->device));
  stats_.bytes_back += entry->bytes;
  if (disk_ != nullptr) {
    entry->memory = to.storage();
    entry->under_way =
        disk_->ReadUrgent(entry->room.extent(), 0, to.mutable_data_ptr(),
                          entry->bytes, entry->what);
    return absl::OkStatus();
  }
  const StreamPoint made = StreamPoint::Now(entry->device);
  const c10::StreamGuard side(SideStream(entry->device));
  made.Order();  // what had its memory before
  TESSERA_RETURN_IF_ERROR(entry->room.CopyTo({0, entry->bytes}, to));
  KeepForCurrentStream(to);
  entry->back = StreamPoint::Now(entry->device);
  entry->memory = to.storage();  // only now: after an error it holds nothing
  return absl::OkStatus();
}

// What somebody has had is not needed again by itself, and what has not left
// for the disk yet is here. An error is told to who asks for that memory.
void ActivationStore::StartGroupBack(int64_t number) {
  for (const std::weak_ptr<Entry>& each : by_group_[number]) {
    const Stored entry = each.lock();
    if (entry == nullptr || entry->asked) continue;
    if (disk_ != nullptr && !entry->is_out) continue;
    EndOut(entry.get());
    const auto start = [&]() ABSL_NO_THREAD_SAFETY_ANALYSIS {
      return StartBack(entry.get());
    };
    (void)CatchTorch(entry->what, start);
  }
}

absl::StatusOr<c10::Storage> ActivationStore::Get(const Stored& stored) {
  Entry* const entry = stored.get();
  return CatchTorch(entry->what, [&]() -> absl::StatusOr<c10::Storage> {
    absl::MutexLock lock(&mutex_);
    if (entry->given.has_value()) {
      if (auto given = entry->given->lock()) {
        return c10::Storage(std::move(given));
      }
    }
    // What has not left yet need not come back.
    const bool here = !std::exchange(entry->is_out, true) && entry->memory;
    if (here) entry->status.Update(entry->under_way.Wait());
    TESSERA_RETURN_IF_ERROR(StartBack(entry));
    if (!std::exchange(entry->asked, true)) {
      const auto mine = by_group_.find(entry->group);
      StartGroupBack(mine->first);
      if (mine != by_group_.begin()) StartGroupBack(std::prev(mine)->first);
    }
    TESSERA_RETURN_IF_ERROR(entry->under_way.Wait());
    entry->back.Order();
    c10::Storage memory = std::exchange(entry->memory, c10::Storage());
    entry->given.reset();
    // Who else has what was never away may write to it.
    if (!here || memory.use_count() == 1) {
      entry->given = memory.getWeakStorageImpl();
    }
    return memory;
  });
}

void ActivationStore::DropFetched() {
  absl::MutexLock lock(&mutex_);
  for (const auto& [number, entries] : by_group_) {
    for (const std::weak_ptr<Entry>& each : entries) {
      const Stored entry = each.lock();
      if (entry == nullptr || !entry->is_out) continue;
      (void)entry->under_way.Wait();
      entry->memory = c10::Storage();
    }
  }
}

ActivationStats ActivationStore::stats() const {
  absl::MutexLock lock(&mutex_);
  ActivationStats stats = stats_;
  stats.gone = gone_;
  return stats;
}

}  // namespace tessera
