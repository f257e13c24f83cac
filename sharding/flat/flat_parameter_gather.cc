// How a unit becomes whole.
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "sharding/flat/flat_parameter.h"
#include "sharding/flat/schedule.h"
#include "sharding/torch/storage_access.h"
#include "sharding/torch/torch_scope.h"
#include "torch/csrc/autograd/graph_task.h"

namespace tessera {
namespace {

bool InForward() { return torch::autograd::get_current_graph_task_id() == -1; }

}  // namespace

// Starts the all-gather; Settle waits for it.
absl::Status FlatParameter::Launch() {
  TorchScope scope;
  const absl::Status allocated = AllocateWhole();
  if (!allocated.ok()) {
    // The others wait for our part, here or in what comes after.
    comm_->Announce(allocated);
    return allocated;
  }
  schedule_->AddLive(layout_.whole_numel());
  if (options_.served != nullptr) {
    auto pull =
        options_.served->Pull(options_.served_key, whole_.Bytes(),
                              CommTag{absl::StrCat("gather of unit ", name_)});
    if (pull.ok()) {
      arriving_ = *std::move(pull);
    } else {
      SetWhole({});
      schedule_->AddLive(-layout_.whole_numel());
    }
    return pull.status();
  }
  const bool near = secondary_holds_;
  const CommTag tag{absl::StrCat(
      near ? "all-gather within a group of unit " : "all-gather of unit ",
      name_)};
  arriving_ = near ? options_.reshard_group->AllGather(secondary_.Bytes(),
                                                       whole_.Bytes(), tag)
                   : comm_->AllGather(shard_.Bytes(), whole_.Bytes(), tag);
  return absl::OkStatus();
}

// The whole copy, and what will be left of it: a rank to which that was refused
// later would gather from another place than the others.
absl::Status FlatParameter::AllocateWhole() {
  FlatBuffer whole, secondary;
  TESSERA_ASSIGN_OR_RETURN(
      whole, FlatBuffer::Allocate(layout_.whole_numel(), dtype_, device_,
                                  MemoryKind::kWorking, Fill::kNone));
  if (options_.reshard_group != nullptr && !secondary_.defined() &&
      InForward()) {
    TESSERA_ASSIGN_OR_RETURN(
        secondary,
        FlatBuffer::Allocate(
            layout_.whole_numel() / options_.reshard_group->world_size(),
            dtype_, device_, MemoryKind::kParameters, Fill::kNone));
    secondary_ = std::move(secondary);
  }
  SetWhole(std::move(whole));
  return absl::OkStatus();
}

// What is on its way has come.
absl::Status FlatParameter::Settle() {
  if (!arriving_.has_value()) return absl::OkStatus();
  const absl::Status status = arriving_->Wait();
  // Half of the owners' new values may be there: hidden for good.
  if (!status.ok() && !options_.stage.sharded_parameters) return status;
  arriving_.reset();
  if (!options_.stage.sharded_parameters) {
    ShowAll();
    ready_ = true;
  } else if (status.ok()) {
    PointAll();
  } else {
    SetWhole({});
    schedule_->AddLive(-layout_.whole_numel());
  }
  return status;
}

absl::Status FlatParameter::Gather() {
  TESSERA_RETURN_IF_ERROR(std::exchange(failed_, absl::OkStatus()));
  if (!whole_.defined()) TESSERA_RETURN_IF_ERROR(Launch());
  return Settle();
}

void FlatParameter::StartGather() {
  absl::MutexLock lock(&mutex_);
  if (!blocked_.ok()) return;  // the others do not gather it either
  if (life_ == Life::kOwned && !whole_.defined()) failed_ = Launch();
}

// After a forward: what the backward will gather from.
void FlatParameter::KeepSecondary() {
  if (!secondary_.defined() || !InForward()) return;
  const Communicator& group = *options_.reshard_group;
  const int64_t part = layout_.whole_numel() / group.world_size();
  TorchScope scope;
  secondary_.View().copy_(
      whole_.View({group.rank() * part, (group.rank() + 1) * part}));
  secondary_holds_ = true;
}

void FlatParameter::DropSecondary() {
  if (options_.reshard_group == nullptr) return;
  absl::MutexLock lock(&mutex_);
  secondary_.Reset();
  secondary_holds_ = false;
}

}  // namespace tessera
