// PlainGpt trains the peers' GPT with libtorch alone: in float32; in bfloat16
// by autocast, as the peers' "single" does; or with a model in bfloat16 and
// float32 masters, which is the work that an engine with bf16 does.
#ifndef BENCHMARKS_GPT_PLAIN_GPT_H_
#define BENCHMARKS_GPT_PLAIN_GPT_H_

#include <torch/torch.h>

#include <memory>
#include <utility>
#include <vector>

#include "ATen/autocast_mode.h"
#include "benchmarks/gpt/peer_gpt.h"
#include "benchmarks/gpt/plain_libtorch.h"
#include "verify/plain/plain_autograd.h"

namespace tessera {

struct PlainGptOptions {
  enum class Precision { kFloat32, kAutocast, kBfloat16 };
  Precision precision = Precision::kFloat32;
  double clip = 0;  // norm of gradients; 0: not clipped
  double lr = 0, weight_decay = 0;
};

class PlainGpt {
 public:
  using Precision = PlainGptOptions::Precision;

  PlainGpt(std::shared_ptr<PeerGpt> model, at::Device device,
           const PlainGptOptions& options)
      : options_(options),
        device_(device.type()),
        model_(std::move(model)),
        optimizer_(TakeMasters(device), options.lr, options.weight_decay) {
    at::autocast::set_autocast_dtype(device_, at::kBFloat16);
  }

  // Returns the loss of a forward, after the update.
  double Step(const at::Tensor& inputs, const at::Tensor& targets) {
    at::autocast::set_autocast_enabled(
        device_, options_.precision == Precision::kAutocast);
    const at::Tensor loss = model_->Loss(inputs, targets);
    at::autocast::clear_cache();
    at::autocast::set_autocast_enabled(device_, false);
    loss.backward();
    const bool apart = options_.precision == Precision::kBfloat16;
    if (apart) GiveGradients();
    if (options_.clip > 0) {
      torch::nn::utils::clip_grad_norm_(optimizer_.parameters(), options_.clip);
    }
    optimizer_.Step();
    if (apart) TakeValues();
    return loss.item<double>();
  }

 private:
  // Moves the model; returns what the optimizer updates.
  std::vector<at::Tensor> TakeMasters(at::Device device) {
    model_->to(device);
    if (options_.precision != Precision::kBfloat16) return model_->parameters();
    std::vector<at::Tensor> masters;
    for (const at::Tensor& p : model_->parameters()) {
      masters.push_back(p.detach().to(at::kFloat, /*non_blocking=*/false,
                                      /*copy=*/true));
    }
    model_->to(at::kBFloat16);
    parameters_ = model_->parameters();
    return masters;
  }

  void GiveGradients() {
    for (size_t i = 0; i < parameters_.size(); ++i) {
      at::Tensor master = optimizer_.parameters()[i];
      master.mutable_grad() = parameters_[i].grad().to(at::kFloat);
      parameters_[i].mutable_grad().reset();
    }
  }

  void TakeValues() {
    const torch::NoGradGuard no_grad;
    at::_foreach_copy_(parameters_, optimizer_.parameters());
  }

  const PlainGptOptions options_;
  const at::DeviceType device_;
  const PlainAutograd plain_autograd_;
  std::shared_ptr<PeerGpt> model_;
  std::vector<at::Tensor> parameters_;  // in bfloat16, beside the masters
  PlainAdamW optimizer_;
};

}  // namespace tessera
#endif  // BENCHMARKS_GPT_PLAIN_GPT_H_
