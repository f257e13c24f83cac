// Why the ranks compare fingerprints first, sizes among them: an all-gather of
// parts of different inputs would give each rank a mixture, and one of parts of
// different sizes would end the group.
//
// Why tensors that are not dense are kept whole: an expanded one has fewer
// elements in memory than a part of it.
//
// Why it is the memory that goes to the host and back, and not the elements: a
// copy of these is dense, of an expanded tensor a multiple of what it holds,
// and what comes back would have other strides than the function saw in
// forward.
#include "sharding/recompute/checkpointed/kept_inputs.h"

#include <algorithm>
#include <utility>

#include "ATen/ATen.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/bits.h"
#include "base/check.h"
#include "base/status.h"
#include "base/torch/torch_scope.h"
#include "base/torch_guard.h"
#include "c10/core/impl/VirtualGuardImpl.h"
#include "comm/all_gather_values.h"
#include "comm/communicator.h"
#include "sharding/flat/pins.h"
#include "sharding/flat/registry.h"

namespace tessera {
namespace {

// The elements of a dense tensor in the order of memory.
at::Tensor Flat(const at::Tensor& dense) {
  return dense.as_strided({dense.numel()}, {1}, dense.storage_offset());
}

uint64_t PrintOf(const at::Tensor& flat, at::IntArrayRef sizes) {
  uint64_t print =
      FingerprintOf(flat) ^ static_cast<uint64_t>(flat.scalar_type());
  for (int64_t size : sizes) {
    print = MixBits(print + kMixStep + static_cast<uint64_t>(size));
  }
  return print;
}

c10::Stream CurrentStream(at::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

}  // namespace

KeptInputs::KeptInputs(const CheckpointOptions& options,
                       const std::vector<at::Tensor>& inputs,
                       OperatorWatch* outer)
    : options_(options) {
  for (const at::Tensor& tensor : inputs) {
    std::optional<Input>& input = inputs_.emplace_back();
    if (!tensor.defined()) continue;
    input.emplace(tensor);
    const bool plain = tensor.has_storage() && tensor.layout() == at::kStrided;
    if (plain) {
      input->layout.emplace(tensor);
      input->storage = tensor.storage().getWeakStorageImpl();
    }
    at::Tensor keep = tensor;
    // What is a parameter costs nothing.
    if (plain && !tensor.is_inference() && !Registry::Global().Find(tensor)) {
      TorchScope scope;
      keep = ToHost(Partition(keep, &*input), &*input);
    }
    input->value.emplace(keep, outer);
  }
}

at::Tensor KeptInputs::Partition(const at::Tensor& tensor, Input* input) const {
  Communicator* const group = options_.partition_over.get();
  const bool parted = group != nullptr && group->world_size() > 1 &&
                      tensor.is_floating_point() &&
                      tensor.is_non_overlapping_and_dense();
  if (!parted) return tensor;
  const at::Tensor flat = Flat(tensor.detach());
  input->partitioned = true;
  if (options_.check != CheckpointOptions::Check::kNever) {
    input->print = PrintOf(flat, tensor.sizes());
  }
  const int64_t n = group->world_size(), numel = flat.numel();
  const int64_t part = (numel + n - 1) / n;
  const int64_t begin = std::min(group->rank() * part, numel);
  const int64_t end = std::min(begin + part, numel);
  at::Tensor mine = at::zeros({part}, flat.options());
  mine.narrow(0, 0, end - begin).copy_(flat.narrow(0, begin, end - begin));
  return mine;
}

at::Tensor KeptInputs::ToHost(const at::Tensor& tensor, Input* input) const {
  if (!options_.keep_on_cpu || tensor.is_cpu()) return tensor;
  const at::Tensor span = SpanOf(tensor.detach());
  at::Tensor host = at::empty(
      span.sizes(), span.options().device(at::kCPU).pinned_memory(true));
  host.copy_(span, /*non_blocking=*/true);
  input->spanned = TensorPlace(tensor);
  input->copied.emplace(tensor.device().type());
  input->copied->record(CurrentStream(tensor.device()));
  return host;
}

bool KeptInputs::Contains(const c10::StorageImpl* storage) const {
  return std::any_of(inputs_.begin(), inputs_.end(), [&](const auto& input) {
    return input && input->storage &&
           input->storage->_unsafe_get_target() == storage;
  });
}

void KeptInputs::Release(const c10::StorageImpl* storage) {
  for (auto& input : inputs_) {
    if (!input || !input->storage ||
        input->storage->_unsafe_get_target() != storage) {
      continue;
    }
    input->value.reset();
  }
}

std::vector<at::Device> KeptInputs::Devices() const {
  std::vector<at::Device> devices;
  for (const auto& input : inputs_) {
    if (input) devices.push_back(input->device);
  }
  return devices;
}

void KeptInputs::Compare() const {
  std::vector<uint64_t> mine;
  for (const auto& input : inputs_) {
    const bool parted = input && input->partitioned && input->value;
    mine.push_back(parted ? input->print : 0);
  }
  auto all = AllGatherLists(
      options_.partition_over.get(), mine,
      {absl::StrCat("fingerprints of the inputs of ", options_.name)});
  ThrowIfError(all.status());
  for (size_t rank = 1; rank < all->size(); ++rank) {
    const auto &first = (*all)[0], &other = (*all)[rank];
    if (first == other) continue;
    const auto at =
        std::mismatch(first.begin(), first.end(), other.begin(), other.end());
    ThrowIfError(absl::InvalidArgumentError(absl::StrCat(
        "[", options_.name, "] tensor ", at.first - first.begin(),
        " of the inputs differs between rank 0 and rank ", rank, " of ",
        all->size(),
        ", expected the same on all ranks of partition_over: pass the group "
        "of ranks that have the same inputs, or no group")));
  }
}

at::Tensor KeptInputs::Whole(const Input& input, const at::Tensor& part) const {
  Communicator* const group = options_.partition_over.get();
  at::Tensor all =
      at::empty({part.numel() * group->world_size()}, part.options());
  ThrowIfError(
      group->AllGather(part, all, {absl::StrCat("input of ", options_.name)})
          .Wait());
  at::Tensor whole = at::empty_strided(input.layout->sizes,
                                       input.layout->strides, part.options());
  Flat(whole).copy_(all.narrow(0, 0, whole.numel()));
  return whole;
}

std::vector<at::Tensor> KeptInputs::Get(Redirects* redirects) const {
  const auto& group = options_.partition_over;
  if (group != nullptr && group->world_size() > 1) Compare();
  std::vector<at::Tensor> tensors;
  PinSet pins;
  // A cast of a parameter is remembered as one where a graph is made of it.
  at::AutoGradMode grad(true);
  for (const auto& input : inputs_) {
    if (!input) {
      tensors.emplace_back();
      continue;
    }
    const c10::Storage* const copy =
        input->storage ? redirects->CopyOf(input->storage->_unsafe_get_target())
                       : nullptr;
    at::Tensor tensor;
    if (copy != nullptr) {
      tensor = input->layout->Over(*copy);
    } else {
      TESSERA_CHECK(input->value.has_value()) << "was given up";
      tensor = input->value->Value(nullptr, /*reader=*/"", &pins);
      TorchScope scope;
      if (input->copied) {
        input->copied->block(CurrentStream(input->device));
        tensor = OverSpan(tensor.to(input->device, /*non_blocking=*/true),
                          input->spanned.sizes, input->spanned.strides);
      }
      if (input->partitioned) tensor = Whole(*input, tensor);
    }
    tensors.push_back(InRole(tensor, input->role));
  }
  return tensors;
}

}  // namespace tessera
