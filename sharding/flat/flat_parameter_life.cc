// How a unit comes to own its parameters' memory, and gives it back.
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "base/torch_guard.h"
#include "c10/core/StorageImpl.h"
#include "sharding/construct/construction.h"
#include "sharding/flat/flat_parameter.h"
#include "sharding/flat/schedule.h"
#include "sharding/torch/storage_access.h"
#include "sharding/torch/torch_scope.h"

namespace tessera {
namespace {

// The numbers of a storage as elements of a flat buffer.
at::Tensor ElementsOf(c10::StorageImpl* storage, at::ScalarType dtype,
                      int64_t numel, at::Device device) {
  return TensorOver(static_cast<char*>(const_cast<void*>(storage->data())),
                    {numel}, {1}, ElementType(dtype), device);
}

Range Moved(Range range, int64_t by) {
  return {range.begin + by, range.end + by};
}

}  // namespace

absl::Status FlatParameter::Adopt() {
  TorchScope scope;
  absl::MutexLock lock(&mutex_);
  life_ = Life::kOwned;
  for (size_t i = 0; i < storages_.size(); ++i) {
    {
      EvictablePins pins;
      TESSERA_RETURN_IF_ERROR(CatchTorch("Engine::Create", [&] {
        pins.Add(ParameterOfSlot(static_cast<int>(i)).tensor);
      }));
      TakeValues(static_cast<int>(i));
    }
    storages_[i]->set_data_ptr_noswap(c10::DataPtr(nullptr, device_));
  }
  if (options_.dtype.has_value() &&
      *options_.dtype != ElementType(original_dtypes_[0])) {
    Convert();
  }
  for (size_t i = 0; i < storages_.size(); ++i) {
    storages_[i]->set_resizable(false);
    UnpointStorage(storages_[i].get(), freed_errors_[i], device_);
  }
  if (whole_.defined()) PointAll();
  for (const auto& p : params_) AddTag(p.tensor);
  ready_ = !options_.stage.sharded_parameters;
  if (options_.served != nullptr) {
    options_.served->Offer(options_.served_key, shard_.Bytes());
  }
  return absl::OkStatus();
}

// What is kept of one storage's numbers goes where it is kept.
void FlatParameter::TakeValues(int i) {
  const Range slot = layout_.slot(i);
  const auto index = static_cast<size_t>(i);
  const at::Tensor values = ElementsOf(
      storages_[index].get(), original_dtypes_[index], slot.numel(), device_);
  if (whole_.defined() && !shared()) whole_.View(slot).copy_(values);
  const Range mine = Intersect(slot, owned_);
  if (mine.empty()) return;
  const at::Tensor part =
      values.narrow(0, mine.begin - slot.begin, mine.numel());
  for (const FlatBuffer* owned : {&master_, &shard_}) {
    if (owned->defined()) {
      owned->View(Moved(mine, -owned_.begin)).copy_(part);
    }
  }
}

// Gives the parameters storages of the working dtype.
void FlatParameter::Convert() {
  originals_ = std::move(storages_);
  storages_.clear();
  for (size_t i = 0; i < originals_.size(); ++i) {
    const auto bytes = static_cast<size_t>(
        layout_.slot(static_cast<int>(i)).numel() * c10::elementSize(dtype_));
    storages_.push_back(c10::make_intrusive<c10::StorageImpl>(
        c10::StorageImpl::use_byte_size_t(), bytes,
        c10::DataPtr(nullptr, device_), /*allocator=*/nullptr,
        /*resizable=*/false));
    originals_[i]->set_resizable(false);
    UnpointStorage(
        originals_[i].get(),
        absl::StrCat("[", name_, "] parameter '",
                     ParameterOfSlot(static_cast<int>(i)).name,
                     "' was converted to ", c10::toString(dtype_),
                     " by Engine::Create, and an alias taken before holds its "
                     "old memory; take aliases afterwards"),
        device_);
  }
  for (const auto& p : params_) {
    SetStorage(p.tensor, storages_[static_cast<size_t>(p.slot)], dtype_);
  }
}

absl::Status FlatParameter::Release() {
  TESSERA_RETURN_IF_ERROR(PrepareUpdate());
  TESSERA_RETURN_IF_ERROR(GiveBack());
  schedule_->Forget(this);
  return absl::OkStatus();
}

absl::Status FlatParameter::GiveBack() {
  TorchScope scope;
  absl::MutexLock lock(&mutex_);
  if (life_ != Life::kOwned) return absl::OkStatus();  // given back already
  TESSERA_RETURN_IF_ERROR(Settle());
  FlatBuffer masters;  // where the parameters get their old dtype back
  if (whole_.defined() && !converted()) {
    TESSERA_RETURN_IF_ERROR(
        CatchTorch("Close", [&] { GiveMemory(whole_.View()); }));
  } else {
    TESSERA_ASSIGN_OR_RETURN(masters, GatherMasters());
    TESSERA_RETURN_IF_ERROR(
        CatchTorch("Close", [&] { GiveMemory(masters.View()); }));
  }
  DropMemory(Life::kReleased);
  return absl::OkStatus();
}

void FlatParameter::DropMemory(Life life) {
  if (options_.stage.sharded_parameters && whole_.defined()) {
    schedule_->AddLive(-layout_.whole_numel());
  }
  SetWhole({});
  private_ = ready_ = false;
  saved_.Reset();
  write_faults_ = nullptr;
  if (options_.served != nullptr) options_.served->Keep(std::move(shard_));
  shard_.Reset();
  secondary_.Reset();
  master_.Reset();
  life_ = life;
}

// The masters of all ranks, [P].
absl::StatusOr<FlatBuffer> FlatParameter::GatherMasters() {
  const at::Tensor mine = master_.defined() ? master_.View() : OwnedWorking();
  FlatBuffer whole;
  TESSERA_ASSIGN_OR_RETURN(
      whole, FlatBuffer::Allocate(layout_.whole_numel(), mine.scalar_type(),
                                  device_, MemoryKind::kWorking, Fill::kNone));
  whole.View(owned_).copy_(mine);
  if (options_.stage.sharded_optimizer) {
    TESSERA_RETURN_IF_ERROR(
        comm_
            ->AllGather(whole.Bytes(owned_), whole.Bytes(),
                        CommTag{absl::StrCat("masters of unit ", name_)})
            .Wait());
  }
  return whole;
}

void FlatParameter::GiveMemory(const at::Tensor& values) {
  at::Allocator* allocator = c10::GetAllocator(device_.type());
  for (size_t i = 0; i < storages_.size(); ++i) {
    const auto& storage = converted() ? originals_[i] : storages_[i];
    const Range slot = layout_.slot(static_cast<int>(i));
    c10::DataPtr memory = allocator->allocate(storage->nbytes());
    TensorOver(static_cast<char*>(memory.get()), {slot.numel()}, {1},
               ElementType(original_dtypes_[i]), device_)
        .copy_(values.narrow(0, slot.begin, slot.numel()));
    ShowStorage(storage.get());
    storage->set_data_ptr_noswap(std::move(memory));
    storage->set_allocator(allocator);
    storage->set_resizable(true);
  }
  for (const auto& p : params_) {
    const auto slot = static_cast<size_t>(p.slot);
    if (converted()) {
      SetStorage(p.tensor, originals_[slot], original_dtypes_[slot]);
      UnpointStorage(storages_[slot].get(),
                     absl::StrCat("parameter '", p.name,
                                  "': its tessera::Engine was closed"),
                     device_);
    }
    RemoveTag(p.tensor);
  }
}

void FlatParameter::Abandon() {
  {
    absl::MutexLock lock(&mutex_);
    if (life_ != Life::kOwned) return;
    (void)Settle();  // nothing may write into our buffers any more
    for (size_t i = 0; i < storages_.size(); ++i) {
      UnpointStorage(
          storages_[i].get(),
          absl::StrCat("parameter '", ParameterOfSlot(static_cast<int>(i)).name,
                       "': its tessera::Engine was destroyed "
                       "without Close(), which gives the "
                       "parameters back"),
          device_);
    }
    DropMemory(Life::kAbandoned);
  }
  schedule_->Forget(this);
}

}  // namespace tessera
