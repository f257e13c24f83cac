#include "loader/tensor_data.h"

#include <algorithm>
#include <cstddef>

#include "ATen/Functions.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "base/torch_guard.h"
#include "c10/core/GradMode.h"
#include "comm/communicator.h"
#include "data/distributed_order.h"

namespace tessera {
namespace {

at::Tensor IndexOf(absl::Span<const int64_t> samples) {
  const auto count = static_cast<int64_t>(samples.size());
  at::Tensor index = at::empty({count}, at::kLong);
  std::copy(samples.begin(), samples.end(), index.mutable_data_ptr<int64_t>());
  return index;
}

}  // namespace

absl::StatusOr<TensorData> TensorData::Create(std::vector<at::Tensor> tensors) {
  const auto refused = [](size_t i, absl::string_view expected,
                          absl::string_view got) {
    return absl::InvalidArgumentError(absl::StrCat(
        "TensorData: tensor ", i, ": expected ", expected, ", got ", got));
  };
  if (tensors.empty()) {
    return absl::InvalidArgumentError("TensorData: expected tensors, got none");
  }
  for (size_t i = 0; i < tensors.size(); ++i) {
    at::Tensor& tensor = tensors[i];
    if (!tensor.defined()) return refused(i, "a tensor", "an undefined one");
    if (!tensor.is_cpu()) {
      return refused(i, "a tensor on the CPU", tensor.device().str());
    }
    if (tensor.dim() == 0 || tensor.size(0) == 0) {
      return refused(i, "samples [N, ...]",
                     tensor.dim() == 0 ? "a scalar" : "no samples");
    }
    if (tensor.size(0) != tensors[0].size(0)) {
      return refused(i, absl::StrCat(tensors[0].size(0), " samples"),
                     absl::StrCat(tensor.size(0)));
    }
    tensor = tensor.detach();
  }
  return TensorData(std::move(tensors));
}

std::vector<at::Tensor> TensorData::Rows(
    absl::Span<const int64_t> samples) const {
  const c10::NoGradGuard no_gradients;
  const at::Tensor index = IndexOf(samples);
  std::vector<at::Tensor> rows;
  for (const at::Tensor& tensor : *tensors_) {
    rows.push_back(at::index_select(tensor, 0, index));
  }
  return rows;
}

Fetch TensorData::fetch() const {
  return [tensors = tensors_](absl::Span<const int64_t> indices,
                              const BatchContext& context)
             -> absl::StatusOr<std::vector<at::Tensor>> {
    const at::Tensor index = IndexOf(indices);
    std::vector<at::Tensor> batch;
    for (const at::Tensor& tensor : *tensors) {
      std::vector<int64_t> sizes = tensor.sizes().vec();
      sizes[0] = index.size(0);
      batch.push_back(context.Empty(sizes, tensor.scalar_type()));
      at::index_select_out(batch.back(), tensor, 0, index);
    }
    return batch;
  };
}

std::vector<at::Tensor> Stack(
    const std::vector<const std::vector<at::Tensor>*>& samples) {
  const size_t count = samples.front()->size();
  for (const std::vector<at::Tensor>* sample : samples) {
    if (sample->size() == count) continue;
    ThrowIfError(absl::InvalidArgumentError(
        absl::StrCat("Stack: one sample of the batch has ", count,
                     " tensors, another has ", sample->size())));
  }
  std::vector<at::Tensor> batch;
  for (size_t t = 0; t < count; ++t) {
    std::vector<at::Tensor> parts;
    for (const std::vector<at::Tensor>* sample : samples) {
      parts.push_back((*sample)[t]);
    }
    batch.push_back(at::stack(parts));
  }
  return batch;
}

absl::StatusOr<std::unique_ptr<DataLoader>> LoadInMemory(
    Fetch fetch, int64_t num_samples, const Communicator& comm,
    const DataLoaderOptions& options, bool shuffle) {
  DistributedSamplerOptions sampler;
  sampler.num_samples = num_samples;
  sampler.rank = comm.rank();
  sampler.world_size = comm.world_size();
  sampler.seed = options.seed;
  sampler.shuffle = shuffle;
  TESSERA_ASSIGN_OR_RETURN(auto order, DistributedOrder::Create(sampler));
  return DataLoader::Create(std::move(order), std::move(fetch), options);
}

}  // namespace tessera
