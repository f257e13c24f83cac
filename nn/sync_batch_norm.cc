// Means and sums of squared deviations are exchanged instead of sums and sums
// of squares: where the mean is large beside the deviation, the difference of
// the latter has no digits left.
//
// It is an all-gather into memory of its own, not a sum in place: an engine
// that recomputes activations follows operators, and a collective is none. It
// keeps memory that no operator has filled (sharding/recompute/tape.h), so that
// the exchange need not be repeated; ranks that keep their activations would
// not take part in a repetition.
//
// Sums over ranks are made by repeated halving: elementwise operators give the
// same bits with any number of threads, so all ranks get the same bits, without
// a second exchange.
#include "nn/sync_batch_norm.h"

#include <torch/torch.h>

#include <optional>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "base/status.h"
#include "base/torch/storage_access.h"
#include "base/torch_guard.h"
#include "comm/world/world.h"
#include "sharding/dispatch/batch_norms.h"
#include "sharding/dispatch/operator_watch.h"
#include "sharding/flat/registry.h"

namespace tessera {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Autocast must not change what is computed in float32 here.
using NoAutocast = c10::impl::ExcludeDispatchKeyGuard;

std::string NameOf(const at::Tensor& input, const BatchNormTensors& tensors,
                   const SyncBatchNormOptions& options) {
  if (!options.name.empty()) return options.name;
  if (const StorageOwner owned = Registry::Global().Find(tensors.weight)) {
    return std::string(absl::StripSuffix(owned.parameter(), ".weight"));
  }
  return absl::StrCat(input.size(1), " channels");
}

std::shared_ptr<Communicator> GroupOf(const SyncBatchNormOptions& options) {
  if (options.group != nullptr) return options.group;
  const World* const world = World::Current();
  if (world == nullptr) {
    ThrowIfError(absl::FailedPreconditionError(
        "SyncBatchNorm: no ranks to exchange statistics with; call "
        "tessera::Init first, or set SyncBatchNormOptions::group"));
  }
  return world->communicator();
}

// Returns the dtype of sums and statistics on a rank.
at::ScalarType ComputedIn(const at::Tensor& input) {
  return input.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

// Returns all dims except that of the channels.
std::vector<int64_t> Reduced(const at::Tensor& input) {
  std::vector<int64_t> dims = {0};
  for (int64_t i = 2; i < input.dim(); ++i) dims.push_back(i);
  return dims;
}

// Views [C] as [1, C, 1, ...].
at::Tensor PerChannel(const at::Tensor& values, const at::Tensor& like) {
  std::vector<int64_t> sizes(static_cast<size_t>(like.dim()), 1);
  sizes[1] = -1;
  return values.to(ComputedIn(like)).view(sizes);
}

// Returns the sum of the rows of [n, ...].
at::Tensor SumOfRows(at::Tensor rows) {
  while (rows.size(0) > 1) {
    const int64_t rest = rows.size(0) / 2, half = rows.size(0) - rest;
    const at::Tensor upper = rows.slice(0, half);
    rows = rows.slice(0, 0, half).clone();
    rows.slice(0, 0, rest).add_(upper);
  }
  return rows.squeeze(0);
}

// Statistics are those of one rank, or of all together, in float64.
struct Statistics {
  at::Tensor count;             // []
  at::Tensor mean, deviations;  // [C]; deviations: sum of their squares
};

// Returns [1 + 2 C]: count, means, sums of squared deviations.
at::Tensor OwnStatistics(const at::Tensor& input) {
  const int64_t channels = input.size(1);
  const auto wide = input.options().dtype(at::kDouble);
  if (input.numel() == 0) return at::zeros({1 + 2 * channels}, wide);
  const int64_t count = input.numel() / channels;
  const auto [variance, mean] = at::var_mean(input.to(ComputedIn(input)),
                                             Reduced(input), /*correction=*/0);
  return at::cat({at::full({1}, static_cast<double>(count), wide),
                  mean.to(at::kDouble),
                  variance.to(at::kDouble).mul_(static_cast<double>(count))});
}

// Combines the statistics of all ranks. COLLECTIVE.
Statistics OfAllRanks(const at::Tensor& input, const std::string& name,
                      Communicator* group) {
  const int64_t ranks = group->world_size(), channels = input.size(1);
  const at::Tensor own = OwnStatistics(input);
  const at::Tensor rows = at::empty({ranks * own.numel()}, own.options());
  ThrowIfError(
      group->AllGather(own, rows, {absl::StrCat("SyncBatchNorm of ", name)})
          .Wait());
  const at::Tensor by_rank = rows.view({ranks, own.numel()});
  const at::Tensor counts = by_rank.slice(1, 0, 1);
  const at::Tensor means = by_rank.slice(1, 1, 1 + channels);
  Statistics all;
  all.count = SumOfRows(counts).squeeze(0);
  all.mean = SumOfRows(counts * means) / all.count.clamp_min(1);
  all.deviations = SumOfRows(by_rank.slice(1, 1 + channels) +
                             counts * (means - all.mean).square());
  // On a device this would wait for it.
  if (input.is_cpu() && all.count.item<double>() == 1) {
    ThrowIfError(absl::InvalidArgumentError(absl::StrCat(
        "SyncBatchNorm of ", name,
        ": expected more than 1 value per channel in training, over all ",
        ranks, " ranks; input here: [", absl::StrJoin(input.sizes(), ", "),
        "]")));
  }
  return all;
}

void Average(const at::Tensor& running, const at::Tensor& fresh,
             double momentum) {
  if (!running.defined()) return;
  at::Tensor mixed = running.to(at::kDouble) * (1 - momentum);
  at::Tensor(running).copy_(mixed.add_(fresh, momentum));
}

// Replaces an undefined parameter by `value`, in the dtype of the statistics.
at::Tensor OrFill(const at::Tensor& parameter, const at::Tensor& mean,
                  double value) {
  return parameter.defined() ? parameter.to(mean.scalar_type())
                             : at::full_like(mean, value);
}

// Call has what a backward needs besides tensors.
struct Call : torch::CustomClassHolder {
  std::string name;
  std::shared_ptr<Communicator> group;
  double eps = 0;
  bool input_grad = false;
  std::optional<at::ScalarType> weight, bias;  // their dtypes; nullopt: absent
};

// Returns [2, C]: this rank's sums of gradients, and of gradients times
// normalized values; these are the gradients of bias and weight.
at::Tensor OwnSums(const at::Tensor& grad, const at::Tensor& input,
                   const at::Tensor& weight, const at::Tensor& mean,
                   const at::Tensor& inverse, double eps) {
  if (input.numel() == 0) return at::zeros({2, input.size(1)}, mean.options());
  const auto sums = at::native_batch_norm_backward(
      grad, input, OrFill(weight, mean, 1), /*running_mean=*/{},
      /*running_var=*/{}, mean, inverse, /*train=*/true, eps,
      /*output_mask=*/{false, true, true});
  return at::stack({std::get<2>(sums), std::get<1>(sums)});
}

struct Normalize : torch::autograd::Function<Normalize> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& input,
                            const std::optional<at::Tensor>& weight,
                            const std::optional<at::Tensor>& bias,
                            const BatchNormTensors& tensors, double momentum,
                            const c10::intrusive_ptr<Call>& call) {
    const NoAutocast no_autocast(c10::autocast_dispatch_keyset);
    const Statistics all = OfAllRanks(input, call->name, call->group.get());
    const at::Tensor variance = all.deviations / all.count.clamp_min(1);
    Average(tensors.running_mean, all.mean, momentum);
    Average(tensors.running_var, all.deviations / (all.count - 1).clamp_min(1),
            momentum);
    const at::ScalarType dtype = ComputedIn(input);
    const at::Tensor mean = all.mean.to(dtype);
    const at::Tensor inverse = (variance + call->eps).rsqrt().to(dtype);
    ctx->save_for_backward({input, tensors.weight, mean, inverse, all.count});
    ctx->saved_data["call"] = c10::IValue::make_capsule(call);
    if (input.numel() == 0) return at::empty_like(input);
    return std::get<0>(at::native_batch_norm(
        input, OrFill(tensors.weight, mean, 1), OrFill(tensors.bias, mean, 0),
        mean, variance.to(dtype), /*training=*/false, /*momentum=*/0,
        call->eps));
  }

  // With z the normalized values and g the gradients, means over all ranks:
  //   g of input = (g - mean(g) - z mean(g z)) weight / deviation
  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const NoAutocast no_autocast(c10::autocast_dispatch_keyset);
    const auto call = c10::static_intrusive_pointer_cast<Call>(
        ctx->saved_data["call"].toCapsule());
    if (at::GradMode::is_enabled()) {
      ThrowIfError(absl::UnimplementedError(absl::StrCat(
          "SyncBatchNorm of ", call->name,
          ": no gradients of gradients (create_graph); use GroupNorm or "
          "BatchNorm there")));
    }
    const variable_list saved = ctx->get_saved_variables();
    const at::Tensor &input = saved[0], &weight = saved[1], &mean = saved[2],
                     &inverse = saved[3], &count = saved[4];
    const at::Tensor own =
        OwnSums(grads[0], input, weight, mean, inverse, call->eps);
    at::Tensor input_grad, weight_grad, bias_grad;
    if (call->bias) bias_grad = own[0].to(*call->bias);
    if (call->weight) weight_grad = own[1].to(*call->weight);
    if (call->input_grad) {
      at::Tensor means = own.to(at::kDouble).contiguous();
      ThrowIfError(
          call->group
              ->AllReduceSum(means, {absl::StrCat("SyncBatchNorm of ",
                                                  call->name, ", backward")})
              .Wait());
      means = means / count.clamp_min(1);
      const auto per_channel = [&](const at::Tensor& values) {
        return PerChannel(values, input);
      };
      input_grad = input.to(mean.scalar_type()) - per_channel(mean);
      input_grad.mul_(per_channel(inverse * means[1]))
          .neg_()
          .add_(grads[0])
          .sub_(per_channel(means[0]))
          .mul_(per_channel(inverse * OrFill(weight, mean, 1)));
      input_grad = input_grad.to(input.scalar_type());
    }
    return {input_grad,   weight_grad,  bias_grad,
            at::Tensor(), at::Tensor(), at::Tensor()};
  }
};

// Throws if a statistic is an engine's parameter: only its owner writes another
// rank's part.
void CheckStatistic(const at::Tensor& statistic, const std::string& name) {
  const StorageOwner owned = Registry::Global().Find(statistic);
  if (!owned) return;
  ThrowIfError(absl::FailedPreconditionError(absl::StrCat(
      "SyncBatchNorm of ", name, ": parameter '", owned.parameter(),
      "' is a running statistic; register it with register_buffer, or name it "
      "in sharding.ignored_parameters")));
}

}  // namespace

at::Tensor SyncBatchNorm(const at::Tensor& input,
                         const BatchNormTensors& tensors, double momentum,
                         double eps, const SyncBatchNormOptions& options) {
  TORCH_CHECK(input.dim() >= 2,
              "SyncBatchNorm: expected an input [N, C, ...], got ",
              input.sizes());
  const std::shared_ptr<Communicator> group = GroupOf(options);
  // A plan of what a step would hold computes nothing.
  if (group->world_size() == 1 || NoValues::IsSet()) {
    return torch::nn::functional::detail::batch_norm(
        input, tensors.running_mean, tensors.running_var, tensors.weight,
        tensors.bias, /*training=*/true, momentum, eps);
  }
  auto call = c10::make_intrusive<Call>();
  call->name = NameOf(input, tensors, options);
  call->group = group;
  call->eps = eps;
  call->input_grad = input.requires_grad();
  if (tensors.weight.defined()) call->weight = tensors.weight.scalar_type();
  if (tensors.bias.defined()) call->bias = tensors.bias.scalar_type();
  CheckStatistic(tensors.running_mean, call->name);
  CheckStatistic(tensors.running_var, call->name);
  // Undefined tensors are no variables.
  const auto given = [](const at::Tensor& t) {
    return t.defined() ? std::optional<at::Tensor>(t) : std::nullopt;
  };
  return Normalize::apply(input, given(tensors.weight), given(tensors.bias),
                          tensors, momentum, call);
}

namespace {

// The weight of module `name` if it is a `Plain` that is to be converted;
// undefined if it is another module.
template <typename Plain>
absl::StatusOr<Tensor> WeightOf(const torch::nn::Module& module,
                                const std::string& name) {
  const auto* const norm = module.as<Plain>();
  if (norm == nullptr) return Tensor();
  const auto refuse = [&](absl::string_view lacks) {
    return absl::InvalidArgumentError(
        absl::StrCat("ConvertSyncBatchNorm: '", name, "' has no ", lacks,
                     "; write tessera::SyncBatchNorm in its place"));
  };
  if (!norm->weight.defined()) return refuse("weight (affine is false)");
  if (!norm->running_mean.defined()) {
    return refuse("running statistics (track_running_stats is false)");
  }
  if (!HasTag(norm->weight)) {
    return absl::FailedPreconditionError(
        absl::StrCat("ConvertSyncBatchNorm: no engine has the weight of '",
                     name, "'; call it after Engine::Create"));
  }
  return norm->weight;
}

}  // namespace

absl::Status ConvertSyncBatchNorm(torch::nn::Module& module,
                                  const SyncBatchNormOptions& options) {
  absl::StatusOr<std::shared_ptr<Communicator>> group =
      CatchTorch("ConvertSyncBatchNorm", [&] { return GroupOf(options); });
  TESSERA_RETURN_IF_ERROR(group.status());
  if ((*group)->world_size() == 1) return absl::OkStatus();
  std::vector<std::pair<std::string, Tensor>> weights;
  const auto add = [&](const torch::nn::Module& m,
                       const std::string& name) -> absl::Status {
    if (IsSyncBatchNorm(m)) return absl::OkStatus();
    for (const auto& weight_of :
         {&WeightOf<torch::nn::BatchNorm1d>, &WeightOf<torch::nn::BatchNorm2d>,
          &WeightOf<torch::nn::BatchNorm3d>}) {
      TESSERA_ASSIGN_OR_RETURN(const Tensor weight, weight_of(m, name));
      if (weight.defined()) weights.emplace_back(name, weight);
    }
    return absl::OkStatus();
  };
  TESSERA_RETURN_IF_ERROR(add(module, "module"));
  for (const auto& m : module.named_modules("", /*include_self=*/false)) {
    TESSERA_RETURN_IF_ERROR(add(*m.value(), m.key()));
  }
  for (const auto& [name, weight] : weights) {
    // This runs until the process ends, and must not keep a group alive.
    const std::weak_ptr<Communicator> kept = *group;
    const std::string label =
        options.name.empty() ? name : absl::StrCat(options.name, ".", name);
    ReplaceBatchNorm(weight, [kept, label](const BatchNormCall& call) {
      const SyncBatchNormOptions own{kept.lock(), label};
      if (own.group == nullptr) {
        ThrowIfError(absl::FailedPreconditionError(absl::StrCat(
            "SyncBatchNorm of ", label, ": its group of ranks is gone")));
      }
      return SyncBatchNorm(
          call.input,
          {call.weight, call.bias, call.running_mean, call.running_var},
          call.momentum, call.eps, own);
    });
  }
  return absl::OkStatus();
}

bool IsSyncBatchNorm(const torch::nn::Module& module) {
  return module.as<SyncBatchNorm1d>() != nullptr ||
         module.as<SyncBatchNorm2d>() != nullptr ||
         module.as<SyncBatchNorm3d>() != nullptr;
}

}  // namespace tessera
