// Why the gradients are computed outside of the autograd function, which only
// hands them over: within its forward grad mode is off, and an engine takes a
// parameter that is used then for one of a checkpoint that may run again in
// backward, whose gradient it reduces late (sharding/gradient/gradients.h).
//
// Why the weight is pinned for the whole loop: each operator pins it for
// itself, so between two chunks it could be freed and gathered again. Ranks
// with different numbers of tokens would then make different numbers of
// collectives.
//
// Why gradients have neither the mean's divisor nor the loss's gradient until
// backward: of the largest numbers 1, float16 keeps what it keeps under any
// loss scale; divided by the number of tokens it would lose small ones.
#include "nn/linear_cross_entropy.h"

#include <torch/torch.h>

#include <algorithm>
#include <optional>
#include <string>
#include <utility>

#include "ATen/autocast_mode.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "base/status.h"
#include "base/torch_guard.h"
#include "sharding/dispatch/operator_watch.h"
#include "sharding/flat/pins.h"
#include "sharding/flat/registry.h"

namespace tessera {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using Reduction = LinearCrossEntropyOptions::Reduction;

// Autocast must not change what is computed in float32 here.
using NoAutocast = c10::impl::ExcludeDispatchKeyGuard;

absl::Status Expected(absl::string_view what, absl::string_view expected,
                      const std::string& got) {
  return absl::InvalidArgumentError(absl::StrCat(
      "LinearCrossEntropy: ", what, ": expected ", expected, ", got ", got));
}

std::string Sizes(const Tensor& t) {
  return absl::StrCat("[", absl::StrJoin(t.sizes(), ", "), "]");
}

absl::Status CheckTensors(const Tensor& hidden, const Tensor& weight,
                          const Tensor& targets, const Tensor& bias) {
  if (weight.dim() != 2 || weight.numel() == 0) {
    return Expected("weight", "[V, D], not empty", Sizes(weight));
  }
  if (hidden.dim() == 0 || hidden.size(-1) != weight.size(1)) {
    return Expected("hidden", absl::StrCat("[..., ", weight.size(1), "]"),
                    Sizes(hidden));
  }
  const at::IntArrayRef tokens = hidden.sizes().slice(0, hidden.dim() - 1);
  if (targets.sizes() != tokens) {
    return Expected("targets",
                    absl::StrCat("[", absl::StrJoin(tokens, ", "), "]"),
                    Sizes(targets));
  }
  if (targets.scalar_type() != at::kLong) {
    return Expected("targets", "int64", at::toString(targets.scalar_type()));
  }
  if (!hidden.is_floating_point() || !weight.is_floating_point()) {
    return Expected("hidden and weight", "floating-point dtypes",
                    absl::StrCat(at::toString(hidden.scalar_type()), " and ",
                                 at::toString(weight.scalar_type())));
  }
  if (!bias.defined()) return absl::OkStatus();
  if (bias.dim() != 1 || bias.size(0) != weight.size(0)) {
    return Expected("bias", absl::StrCat("[", weight.size(0), "]"),
                    Sizes(bias));
  }
  if (bias.scalar_type() != weight.scalar_type()) {
    return Expected("bias", at::toString(weight.scalar_type()),
                    at::toString(bias.scalar_type()));
  }
  return absl::OkStatus();
}

// A device would have to be waited for, and a plan has no values.
absl::Status CheckTargets(const Tensor& targets, int64_t vocabulary,
                          int64_t ignore_index) {
  if (!targets.is_cpu() || NoValues::IsSet()) return absl::OkStatus();
  const Tensor outside =
      targets.masked_select(targets.lt(0)
                                .logical_or_(targets.ge(vocabulary))
                                .logical_and_(targets.ne(ignore_index)));
  if (outside.numel() == 0) return absl::OkStatus();
  return Expected(
      "targets",
      absl::StrCat("0 to ", vocabulary - 1, ", or ignore_index ", ignore_index),
      absl::StrCat(outside[0].item<int64_t>()));
}

absl::Status Check(const Tensor& hidden, const Tensor& weight,
                   const Tensor& targets,
                   const LinearCrossEntropyOptions& options) {
  TESSERA_RETURN_IF_ERROR(CheckTensors(hidden, weight, targets, options.bias));
  if (options.chunk < 0) {
    return Expected("chunk", "0 or more tokens", absl::StrCat(options.chunk));
  }
  const double smoothing = options.label_smoothing;
  if (!(smoothing >= 0 && smoothing <= 1)) {  // written so that NaN is refused
    return Expected("label_smoothing", "0 to 1", absl::StrCat(smoothing));
  }
  return CheckTargets(targets, weight.size(0), options.ignore_index);
}

// The dtype of the product: what at::linear would make of the weight's.
at::ScalarType ProductDtype(const Tensor& weight) {
  const at::ScalarType own = weight.scalar_type();
  const at::DeviceType device = weight.device().type();
  return own != at::kDouble && at::autocast::is_autocast_enabled(device)
             ? at::autocast::get_autocast_dtype(device)
             : own;
}

// The dtype of what follows the product.
at::ScalarType WideDtype(const Tensor& weight) {
  return weight.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

// Without history. Undefined gradients are not wanted.
struct Gradients {
  Tensor hidden;        // [N, D], the product's dtype
  Tensor weight, bias;  // [V, D], [V]; wide
  bool wanted() const {
    return hidden.defined() || weight.defined() || bias.defined();
  }
};

// One call, without history; all of the product's dtype.
struct Operands {
  Tensor hidden;   // [N, D]
  Tensor weight;   // [V, D]
  Tensor bias;     // [V], or undefined
  Tensor targets;  // [N]
  int64_t ignore_index = 0;
  double smoothing = 0;

  // Returns the part of tokens [begin, begin + length).
  Operands Tokens(int64_t begin, int64_t length) const {
    Operands part = *this;
    part.hidden = hidden.narrow(0, begin, length);
    part.targets = targets.narrow(0, begin, length);
    return part;
  }
};

// Returns the losses [n] of the tokens with these `logits` [n, V], which become
// their gradient, if that is wanted, or anything.
Tensor TakeLosses(const Operands& call, bool gradient, Tensor& logits) {
  const double smooth = call.smoothing;
  const auto words = static_cast<double>(logits.size(1));
  const Tensor counts = call.targets.ne(call.ignore_index);
  // Any word serves for a token that does not count.
  const Tensor words_due =
      call.targets.masked_fill(counts.logical_not(), 0).unsqueeze(1);
  logits.sub_(logits.amax(1, /*keepdim=*/true));
  Tensor expected = logits.gather(1, words_due).squeeze(1);
  if (smooth > 0) {
    expected = expected * (1 - smooth) + logits.sum(1) * (smooth / words);
  }
  const Tensor sums = logits.exp_().sum(1);
  const Tensor losses =
      (sums.log() - expected).masked_fill_(counts.logical_not(), 0);
  if (!gradient) return losses;
  const Tensor share = counts.to(logits.scalar_type());
  logits.mul_((share / sums).unsqueeze(1));
  if (smooth > 0) logits.sub_((share * (smooth / words)).unsqueeze(1));
  logits.scatter_add_(1, words_due, (share * (smooth - 1)).unsqueeze(1));
  return losses;
}

// Adds a^T b to `sum`, which is wide.
void AddProduct(const Tensor& a, const Tensor& b, Tensor& sum) {
  if (a.scalar_type() == sum.scalar_type()) {
    sum.addmm_(a.t(), b);
  } else if (a.is_cuda() && !NoValues::IsSet()) {
    sum.add_(at::mm(a.t(), b, sum.scalar_type()));  // no rounding between
  } else if (a.scalar_type() == at::kHalf) {
    sum.addmm_(a.t().to(at::kFloat), b.to(at::kFloat));  // it could overflow
  } else {
    sum.add_(at::mm(a.t(), b));
  }
}

// Adds what tokens from `begin` on bring to the gradients; `logits` is the
// gradient of their logits.
void AddGradients(const Operands& tokens, const Tensor& logits, int64_t begin,
                  Gradients& sums) {
  const Tensor narrow = logits.to(tokens.hidden.scalar_type());
  if (sums.hidden.defined()) {
    Tensor rows = sums.hidden.narrow(0, begin, logits.size(0));
    at::mm_out(rows, narrow, tokens.weight);
  }
  if (sums.weight.defined()) AddProduct(narrow, tokens.hidden, sums.weight);
  if (sums.bias.defined()) sums.bias.add_(logits.sum(0));
}

// Returns the losses [N], and fills the gradients that are defined.
Tensor ComputeInChunks(const Operands& call, int64_t chunk,
                       Gradients& gradients) {
  const at::ScalarType wide = WideDtype(call.weight);
  const int64_t count = call.targets.size(0);
  const Tensor losses = at::empty({count}, call.hidden.options().dtype(wide));
  for (int64_t begin = 0; begin < count; begin += chunk) {
    const int64_t length = std::min(chunk, count - begin);
    const Operands tokens = call.Tokens(begin, length);
    Tensor logits =
        at::linear(tokens.hidden, tokens.weight, tokens.bias).to(wide);
    losses.narrow(0, begin, length)
        .copy_(TakeLosses(tokens, gradients.wanted(), logits));
    if (gradients.wanted()) AddGradients(tokens, logits, begin, gradients);
  }
  return losses;
}

struct Outcome {
  Tensor loss;   // []
  Tensor share;  // [], what each token's loss counts in it
  Gradients gradients;
};

// HandOver gives the outcome's loss a history.
struct HandOver : torch::autograd::Function<HandOver> {
  static Tensor forward(AutogradContext* ctx, const Tensor& hidden,
                        const Tensor& weight, const std::optional<Tensor>& bias,
                        const Outcome& outcome) {
    const Gradients& g = outcome.gradients;
    ctx->save_for_backward({g.hidden, g.weight, g.bias, outcome.share});
    ctx->saved_data["dtype"] = weight.scalar_type();
    return outcome.loss;
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const NoAutocast no_autocast(c10::autocast_dispatch_keyset);
    if (at::GradMode::is_enabled()) {
      ThrowIfError(absl::UnimplementedError(
          "LinearCrossEntropy: no gradients of gradients (create_graph); use "
          "cross_entropy of at::linear there"));
    }
    const variable_list saved = ctx->get_saved_variables();
    const at::ScalarType dtype = ctx->saved_data["dtype"].toScalarType();
    const Tensor& share = saved[3];
    const Tensor scale = grads[0].to(share.scalar_type()) * share;
    const auto scaled = [&](const Tensor& gradient) {
      if (!gradient.defined()) return Tensor();
      return gradient.to(scale.scalar_type()).mul(scale).to(dtype);
    };
    return {scaled(saved[0]), scaled(saved[1]), scaled(saved[2]), Tensor()};
  }
};

// Keeps the flats of parameters whole.
void Pin(const Tensor& tensor, PinSet* pins) {
  if (!tensor.defined()) return;
  if (const StorageOwner owned = Registry::Global().Find(tensor)) {
    pins->Add(owned.flat);
  }
}

Tensor Detached(const Tensor& t) { return t.defined() ? t.detach() : t; }

Gradients Wanted(const Tensor& hidden, const Tensor& weight,
                 const Tensor& bias) {
  Gradients wanted;
  if (!at::GradMode::is_enabled()) return wanted;
  const auto wide = weight.options().dtype(WideDtype(weight));
  if (hidden.requires_grad()) {
    wanted.hidden = at::empty(hidden.sizes(), hidden.options());
  }
  if (weight.requires_grad()) wanted.weight = at::zeros(weight.sizes(), wide);
  if (bias.defined() && bias.requires_grad()) {
    wanted.bias = at::zeros(bias.sizes(), wide);
  }
  return wanted;
}

}  // namespace

int64_t LinearCrossEntropyChunk(int64_t vocabulary) {
  constexpr int64_t kLogits = int64_t{1} << 25, kLeast = 256;
  return std::max(kLeast, kLogits / vocabulary / kLeast * kLeast);
}

Tensor LinearCrossEntropy(const Tensor& hidden, const Tensor& weight,
                          const Tensor& targets,
                          const LinearCrossEntropyOptions& options) {
  ThrowIfError(Check(hidden, weight, targets, options));
  const at::ScalarType dtype = ProductDtype(weight);
  const Tensor rows = hidden.reshape({-1, weight.size(1)}).to(dtype);
  const Tensor matrix = weight.to(dtype);
  const Tensor bias =
      options.bias.defined() ? options.bias.to(dtype) : options.bias;
  const NoAutocast no_autocast(c10::autocast_dispatch_keyset);
  Outcome outcome;
  {
    PinSet pins;
    Pin(matrix, &pins);
    Pin(bias, &pins);
    const Operands call = {rows.detach(),        matrix.detach(),
                           Detached(bias),       targets.reshape({-1}),
                           options.ignore_index, options.label_smoothing};
    outcome.gradients = Wanted(rows, matrix, bias);
    const int64_t chunk = options.chunk > 0
                              ? options.chunk
                              : LinearCrossEntropyChunk(weight.size(0));
    outcome.loss = ComputeInChunks(call, chunk, outcome.gradients).sum();
    outcome.share = at::ones_like(outcome.loss);
    if (options.reduction == Reduction::kMean) {
      const Tensor count = call.targets.ne(options.ignore_index).sum();
      outcome.loss = outcome.loss / count;
      outcome.share /= count.clamp_min(1);
    }
  }
  if (!outcome.gradients.wanted()) return outcome.loss;
  return HandOver::apply(
      rows, matrix, bias.defined() ? std::optional<Tensor>(bias) : std::nullopt,
      outcome);
}

}  // namespace tessera
