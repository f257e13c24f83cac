// SyncBatchNorm1d to 3d normalize by the statistics of all ranks' batches
// together. They replace torch::nn::BatchNorm1d to 3d, with the same options,
// parameters and buffers, so that checkpoints fit either:
//
//   norm = register_module("norm", tessera::SyncBatchNorm2d(64));
//
// In training, a forward exchanges each rank's count, mean and sum of squared
// deviations per channel, and a backward two sums per channel:
//
//   rank 0   n0, mean0, M2_0 --+                    +--> mean, variance of the
//   rank 1   n1, mean1, M2_1 --+-- one all-gather --+    whole batch, the same
//   ...                                                  bits on all ranks
//
// Batches may differ in size. A rank that has no samples calls forward with an
// empty batch, [0, C, ...], and backward with a loss made of its result. (A
// previous batch with a loss of weight 0 would count in the statistics.) In
// eval mode, and in a group of one, this is bitwise identical to
// torch::nn::BatchNorm, and nothing is exchanged.
//
// Numbers. Sums are float32 (float64 for float64 input) on each rank, even
// if input or parameters have 16 bits, and float64 over ranks, in a fixed
// order. So results and running statistics are identical on all ranks and in
// each run, and equal those of one process with the whole batch except for
// rounding: with u the unit roundoff of float32, s = weight / sqrt(variance +
// eps), M the largest |mean| of a rank and z the normalized value, an element
// on the CPU differs from exact arithmetic by at most 10 u ((1 + |z|) (|x| + M)
// |s| + |bias|), before it is rounded to a 16-bit dtype.
// tests/engine/sync_batch_norm_test.cc derives that, and the bound of
// gradients.
//
// Gradients are those of the sum of all ranks' losses. The average or weighted
// mean that an engine then makes equals that of one process with the whole
// batch.
//
// In training, forward and backward are COLLECTIVE over the group: all ranks
// run the same of these layers in the same order. If one does not, all end with
// an error that names the layer ("SyncBatchNorm of blocks.0.norm") and what the
// other rank was in. Within tessera::Checkpointed the exchange is repeated in
// backward; for modules that activation_checkpointing.units names it is not.
// Running statistics are updated once in either case.
//
// Errors are thrown as StatusException: FailedPrecondition without a group, or
// where a running statistic is a parameter of an engine; InvalidArgument if all
// ranks together have one value per channel; Unimplemented for a gradient of a
// gradient; and errors of the communicator.
#ifndef NN_SYNC_BATCH_NORM_H_
#define NN_SYNC_BATCH_NORM_H_

#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "ATen/core/Tensor.h"
#include "absl/status/status.h"
#include "comm/communicator.h"
#include "torch/nn/modules/batchnorm.h"
#include "torch/nn/pimpl.h"

namespace tessera {

struct SyncBatchNormOptions {
  // The ranks whose batches are normalized together; null: all of the job
  // (World::Current()).
  std::shared_ptr<Communicator> group;
  // A name for messages. Empty: the engine's name of its weight, or else its
  // number of channels.
  std::string name;
};

// The arguments of one call besides its input. Undefined tensors are absent.
struct BatchNormTensors {
  at::Tensor weight, bias;               // [C]
  at::Tensor running_mean, running_var;  // [C]; updated if defined
};

// Computes torch::batch_norm in training, over the group. `momentum` is the
// weight of the new values in the running statistics. COLLECTIVE.
at::Tensor SyncBatchNorm(const at::Tensor& input,
                         const BatchNormTensors& tensors, double momentum,
                         double eps, const SyncBatchNormOptions& options = {});

// `Base` is torch::nn::BatchNormNdImpl. The layer still counts as one (as<>()),
// for example for weight decay's exceptions and for what is kept in float32.
template <typename Base, typename Derived>
class SyncBatchNormImplBase : public Base {
 public:
  // Makes the layer with libtorch's options, on the CPU. LOCAL.
  explicit SyncBatchNormImplBase(const torch::nn::BatchNormOptions& options,
                                 SyncBatchNormOptions sync = {})
      : Base(options), sync_(std::move(sync)) {}

  // Normalizes `input`, of Base's shapes, by the statistics of all of the
  // group's ranks: COLLECTIVE while it is training; LOCAL in evaluation, as
  // Base. Throws c10::Error for another shape, and for a group that has failed.
  at::Tensor forward(const at::Tensor& input) {
    if (!this->is_training()) return Base::forward(input);
    this->_check_input_dim(input);
    const auto& options = this->options;
    double momentum = options.momentum().value_or(0);
    if (this->num_batches_tracked.defined()) {
      this->num_batches_tracked += 1;
      if (!options.momentum().has_value()) {  // the mean over all batches
        momentum = 1.0 / this->num_batches_tracked.template item<double>();
      }
    }
    return SyncBatchNorm(
        input,
        {this->weight, this->bias, this->running_mean, this->running_var},
        momentum, options.eps(), sync_);
  }

  std::shared_ptr<torch::nn::Module> clone(
      const std::optional<at::Device>& device = std::nullopt) const override {
    auto copy = std::make_shared<Derived>(this->options, sync_);
    const at::NoGradGuard no_grad;
    const auto take = [&](const at::Tensor& from, at::Tensor to) {
      if (!from.defined()) return;
      to.set_data(from.to(device.value_or(from.device()), from.scalar_type(),
                          /*non_blocking=*/false, /*copy=*/true));
      to.set_requires_grad(from.requires_grad());
    };
    take(this->weight, copy->weight);
    take(this->bias, copy->bias);
    take(this->running_mean, copy->running_mean);
    take(this->running_var, copy->running_var);
    take(this->num_batches_tracked, copy->num_batches_tracked);
    copy->train(this->is_training());
    return copy;
  }

  const SyncBatchNormOptions& sync() const { return sync_; }

 private:
  SyncBatchNormOptions sync_;
};

#define TESSERA_SYNC_BATCH_NORM(D)                                         \
  class SyncBatchNorm##D##dImpl                                            \
      : public SyncBatchNormImplBase<torch::nn::BatchNorm##D##dImpl,       \
                                     SyncBatchNorm##D##dImpl> {            \
   public:                                                                 \
    using SyncBatchNormImplBase<                                           \
        torch::nn::BatchNorm##D##dImpl,                                    \
        SyncBatchNorm##D##dImpl>::SyncBatchNormImplBase;                   \
    void pretty_print(std::ostream& stream) const override {               \
      stream << "tessera::SyncBatchNorm" #D "d(" << options.num_features() \
             << ")";                                                       \
    }                                                                      \
  }

TESSERA_SYNC_BATCH_NORM(1);
TESSERA_SYNC_BATCH_NORM(2);
TESSERA_SYNC_BATCH_NORM(3);
TORCH_MODULE(SyncBatchNorm1d);  // input [N, C] or [N, C, L]
TORCH_MODULE(SyncBatchNorm2d);  // input [N, C, H, W]
TORCH_MODULE(SyncBatchNorm3d);  // input [N, C, D, H, W]

#undef TESSERA_SYNC_BATCH_NORM

// Makes the torch::nn::BatchNorm1d to 3d of a module that cannot be changed do
// the same from now on, as long as an engine has their weights. In a group of
// one it does nothing. One difference: a rank's own batch may be empty, but
// must not have one value per channel, which torch::nn::BatchNorm refuses
// first.
//
// LOCAL; call it on all ranks, after Engine::Create. The group must live as
// long as the module is trained. Returns FailedPrecondition where no engine has
// a weight. InvalidArgument names a BatchNorm without a weight, whose operator
// cannot be seen, or without running statistics, whose evaluation looks like
// training. After an error nothing is changed.
absl::Status ConvertSyncBatchNorm(torch::nn::Module& module,
                                  const SyncBatchNormOptions& options = {});

// Returns whether the module itself is one of the three.
bool IsSyncBatchNorm(const torch::nn::Module& module);

}  // namespace tessera
#endif  // NN_SYNC_BATCH_NORM_H_
