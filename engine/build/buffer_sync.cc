#include "engine/build/buffer_sync.h"

#include <algorithm>
#include <map>

#include "ATen/ops/empty.h"
#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "base/layout/flat_buffer.h"
#include "base/status.h"
#include "base/torch/torch_scope.h"
#include "torch/nn/module.h"

namespace tessera {
namespace {

// What must be the same on all ranks: "running_mean: Float [6]".
std::string LineOf(const std::string& name, const at::Tensor& t) {
  return absl::StrCat(name, ": ", c10::toString(t.scalar_type()), " [",
                      absl::StrJoin(t.sizes(), ", "), "]");
}

// The dtype that values are added up in.
at::ScalarType SumDtype(at::ScalarType dtype) {
  return c10::elementSize(dtype) < 4 ? at::kFloat : dtype;
}

bool IsAveraged(at::ScalarType dtype) {
  return c10::isFloatingType(dtype) || c10::isComplexType(dtype);
}

}  // namespace

// Each once, under its first name.
std::vector<BufferSync::Named> BufferSync::Buffers() const {
  std::vector<Named> buffers;
  absl::flat_hash_set<const void*> seen;
  for (const auto& entry : module_->named_buffers(/*recurse=*/true)) {
    const at::Tensor& t = entry.value();
    if (!t.defined() || !seen.insert(t.unsafeGetTensorImpl()).second) continue;
    buffers.emplace_back(entry.key(), t);
  }
  return buffers;
}

absl::StatusOr<std::unique_ptr<BufferSync>> BufferSync::Create(
    const torch::nn::Module* module, Values values, at::Device device,
    Communicator* comm) {
  std::unique_ptr<BufferSync> sync(
      new BufferSync(module, values, device, comm));
  for (const auto& [name, tensor] : sync->Buffers()) {
    sync->known_.push_back(LineOf(name, tensor));
  }
  TESSERA_ASSIGN_OR_RETURN(
      const auto all,
      comm->AllGatherStrings(absl::StrJoin(sync->known_, "\n"),
                             CommTag{"comparison of the buffers"}));
  const std::vector<std::string> first = absl::StrSplit(all[0], '\n');
  for (size_t rank = 1; rank < all.size(); ++rank) {
    if (all[rank] == all[0]) continue;
    const std::vector<std::string> theirs = absl::StrSplit(all[rank], '\n');
    size_t i = 0;
    while (i < first.size() && i < theirs.size() && first[i] == theirs[i]) ++i;
    const auto line = [i](const std::vector<std::string>& lines) {
      return i < lines.size() && !lines[i].empty() ? lines[i] : "none";
    };
    return absl::InvalidArgumentError(absl::StrCat(
        "sharding.buffer_sync: buffer ", i, " of the module differs between ",
        "rank 0 (", line(first), ") and rank ", rank, " (", line(theirs),
        "); build the same module on every rank"));
  }
  return sync;
}

absl::Status BufferSync::CheckKnown(const std::vector<Named>& buffers) const {
  for (size_t i = 0; i < std::max(buffers.size(), known_.size()); ++i) {
    const std::string now = i < buffers.size()
                                ? LineOf(buffers[i].first, buffers[i].second)
                                : "none";
    const std::string before = i < known_.size() ? known_[i] : "none";
    if (now == before) continue;
    return absl::FailedPreconditionError(absl::StrCat(
        "sharding.buffer_sync: buffer ", i, " of the module was, at ",
        "Engine::Create, ", before, ", and is now ", now,
        "; Close() the engine and Create another"));
  }
  return absl::OkStatus();
}

absl::Status BufferSync::Sync() {
  const std::vector<Named> buffers = Buffers();
  TESSERA_RETURN_IF_ERROR(comm_->AgreeOk(CheckKnown(buffers), "Engine::Step"));
  std::map<at::ScalarType, std::vector<at::Tensor>> groups;
  for (const auto& [name, tensor] : buffers) {
    if (tensor.numel() > 0) groups[tensor.scalar_type()].push_back(tensor);
  }
  for (const auto& [dtype, group] : groups) {
    TESSERA_RETURN_IF_ERROR(SyncGroup(group));
  }
  return absl::OkStatus();
}

// Buffers of one dtype.
absl::Status BufferSync::SyncGroup(const std::vector<at::Tensor>& buffers) {
  TorchScope scope;
  const at::ScalarType dtype = buffers[0].scalar_type();
  const bool mean = values_ == Values::kMean && IsAveraged(dtype);
  int64_t numel = 0;
  for (const at::Tensor& t : buffers) numel += t.numel();
  const at::Tensor flat = at::empty(
      {numel},
      at::TensorOptions(mean ? SumDtype(dtype) : dtype).device(device_));
  const auto each_part = [&](auto&& use) {
    int64_t begin = 0;
    for (const at::Tensor& t : buffers) {
      use(t, flat.narrow(0, begin, t.numel()).view(t.sizes()));
      begin += t.numel();
    }
  };
  each_part([](const at::Tensor& t, const at::Tensor& part) { part.copy_(t); });
  const auto over = [&](at::ScalarType as, int64_t count) {
    return TensorOver(static_cast<char*>(flat.mutable_data_ptr()), {count}, {1},
                      as, device_);
  };
  const CommTag tag{absl::StrCat("buffers of ", c10::toString(dtype))};
  if (mean) {
    const at::Tensor numbers =
        over(ElementType(flat.scalar_type()), numel * ElementsPerNumber(dtype));
    TESSERA_RETURN_IF_ERROR(comm_->AllReduceSum(numbers, tag).Wait());
    numbers.div_(comm_->world_size());
  } else {
    TESSERA_RETURN_IF_ERROR(
        comm_
            ->Broadcast(over(at::kByte, static_cast<int64_t>(flat.nbytes())), 0,
                        tag)
            .Wait());
  }
  each_part([](const at::Tensor& t, const at::Tensor& part) { t.copy_(part); });
  return absl::OkStatus();
}

}  // namespace tessera
