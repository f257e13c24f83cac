// Helpers that the files of test models share.
#ifndef TESTS_MODELS_MODELS_INTERNAL_H_
#define TESTS_MODELS_MODELS_INTERNAL_H_

#include <torch/torch.h>

#include <functional>
#include <map>
#include <memory>
#include <string>

#include "parallel/tensor/placed.h"
#include "tests/models/models.h"

namespace tessera {

// Random inputs of one micro-batch of one rank, on the model's device. Where
// sequences are divided, so are those of which the ranks divide a dimension:
// the second, else the first of the others.
class Inputs {
 public:
  Inputs(const TestModel& model, int rank, int64_t micro_batch)
      : model_(model),
        dtype_(model.dtype()),
        device_(model.parameters()[0].device()),
        generator_(at::detail::createCPUGenerator(
            1000003 * static_cast<uint64_t>(micro_batch) +
            static_cast<uint64_t>(rank) + 17)) {}

  // Returns numbers in the model's dtype.
  at::Tensor Normal(at::IntArrayRef sizes) {
    return Divided(Target(sizes).to(dtype_));
  }
  at::Tensor Target(at::IntArrayRef sizes) {
    return torch::randn(sizes, generator_).to(device_);
  }
  at::Tensor Tokens(int64_t below, at::IntArrayRef sizes) {
    return Divided(
        torch::randint(below, sizes, generator_, torch::kLong).to(device_));
  }

 private:
  at::Tensor Divided(const at::Tensor& whole) const {
    const std::shared_ptr<PartGroup> group = GroupOfParts();
    if (group == nullptr) return whole;
    for (const int64_t dim : {1, 0, 2, 3}) {
      if (dim >= whole.dim() || whole.size(dim) % group->size() != 0) continue;
      return Divide(whole, TensorPlacement::Shard(dim), group);
    }
    return whole;
  }

  // Returns null where inputs stay whole.
  std::shared_ptr<PartGroup> GroupOfParts() const {
    for (const at::Tensor& parameter : model_.parameters()) {
      const Placed* const placed = PlacedOf(parameter);
      if (placed == nullptr) continue;
      const bool divides = placed->placement.kind == TensorPlacement::kCopy ||
                           model_.divides_inputs;
      return divides ? placed->group : nullptr;
    }
    return nullptr;
  }

  const TestModel& model_;
  const at::ScalarType dtype_;
  const at::Device device_;
  at::Generator generator_;
};

// Computes layer(x), in the dtype of the layer.
template <typename Layer>
at::Tensor In(Layer& layer, const at::Tensor& x) {
  return layer(x.to(layer->weight.dtype()));
}

// Losses are float32, and so is everything after the network: float16 cannot
// hold a loss times its scale.
inline at::Tensor MseLoss(const at::Tensor& out, const at::Tensor& target) {
  return torch::mse_loss(out.to(torch::kFloat), target);
}
inline at::Tensor CrossEntropy(const at::Tensor& logits,
                               const at::Tensor& classes) {
  return torch::cross_entropy_loss(logits.to(torch::kFloat), classes);
}

using ModelMakers =
    std::map<std::string, std::function<std::shared_ptr<TestModel>()>>;

template <typename T>
std::shared_ptr<TestModel> MakeModel() {
  return std::make_shared<T>();
}

ModelMakers NetworkModels();    // models_networks.cc
ModelMakers ParameterModels();  // models_parameters.cc
ModelMakers BatchModels();      // models_batches.cc
ModelMakers LoopModels();       // models_loops.cc
ModelMakers ZooModels();        // models_zoo.cc

}  // namespace tessera
#endif  // TESTS_MODELS_MODELS_INTERNAL_H_
