// Runs a variant with plain libtorch: the reference.
#include <ATen/autocast_mode.h>
#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/torch_guard.h"
#include "tests/zoo/rig.h"
#include "verify/plain/plain_autograd.h"

namespace tessera::zoo {
namespace {

bool Is16Bit(at::ScalarType dtype) {
  return dtype == at::kBFloat16 || dtype == at::kHalf;
}

Tensor Reals(const Tensor& t) {
  return t.is_complex() ? at::view_as_real(t) : t;
}

bool IsNorm(nn::Module& m) {
  return m.as<nn::LayerNorm>() != nullptr || m.as<nn::GroupNorm>() != nullptr ||
         m.as<nn::BatchNorm1d>() != nullptr ||
         m.as<nn::BatchNorm2d>() != nullptr ||
         m.as<nn::InstanceNorm2d>() != nullptr;
}

// Steps one parameter as torch.optim.AdamW(fused=True). Zeros at the end send
// all elements of a float32 one through the kernel's vectorised body:
// docs/design.md ("Optimizer and layout") promises its bits, not those of the
// scalar code for the last few.
void FusedAdamW(const Tensor& master, const Tensor& exp_avg,
                const Tensor& exp_avg_sq, const Tensor& gradient, int64_t step,
                double rate) {
  const int64_t numel = master.numel();
  const int64_t pad =
      master.scalar_type() == at::kFloat ? (64 - numel % 64) % 64 : 0;
  const auto padded = [&](const Tensor& t) {
    return at::constant_pad_nd(t.reshape({-1}), {0, pad}).clone();
  };
  const Tensor p = padded(master), m = padded(exp_avg), v = padded(exp_avg_sq);
  at::_fused_adamw_({p}, {padded(gradient)}, {m}, {v}, {},
                    {torch::full({}, static_cast<double>(step))}, rate, 0.9,
                    0.999, kWeightDecay, 1e-8, /*amsgrad=*/false,
                    /*maximize=*/false);
  const auto back = [&](const Tensor& to, const Tensor& from) {
    to.copy_(from.narrow(0, 0, numel).view(to.sizes()));
  };
  back(master, p);
  back(exp_avg, m);
  back(exp_avg_sq, v);
}

class PlainTraining : public Training {
 public:
  PlainTraining(std::shared_ptr<nn::Module> module, const Recipe& recipe,
                std::shared_ptr<Communicator> comm);
  void Backward(const Tensor& loss, Loss options) override;
  void Step() override;
  void SetRate(double rate) override { rate_ = rate; }
  Tensor UnderAutocast(const std::function<Tensor()>& forward) override;
  void Close() override;

 private:
  struct Parameter {
    Tensor tensor;
    Tensor master, exp_avg, exp_avg_sq;  // undefined while frozen; real
    Tensor gradient;                     // of the step
    int64_t steps = 0;
  };
  void Convert();
  void Reduce();
  void Average(Parameter* p, const std::vector<std::string>& sent) const;
  double Factor() const;

  const std::shared_ptr<nn::Module> module_;
  const Recipe recipe_;
  const std::shared_ptr<Communicator> comm_;
  std::vector<Parameter> parameters_;
  std::unique_ptr<torch::optim::AdamW> optimizer_;  // of masters, if exact
  double scale_ = 1;
  double rate_ = kRate;
  int micro_batches_ = 0;
};

PlainTraining::PlainTraining(std::shared_ptr<nn::Module> module,
                             const Recipe& recipe,
                             std::shared_ptr<Communicator> comm)
    : module_(std::move(module)), recipe_(recipe), comm_(std::move(comm)) {
  torch::NoGradGuard no_grad;
  for (const auto& p : module_->named_parameters()) {
    const Tensor& t = p.value();
    const bool seen = std::any_of(
        parameters_.begin(), parameters_.end(),
        [&](const Parameter& other) { return other.tensor.is_same(t); });
    const auto& ignored = recipe_.ignored;
    if (seen ||
        std::find(ignored.begin(), ignored.end(), p.key()) != ignored.end()) {
      continue;
    }
    Parameter own;
    own.tensor = t;
    own.master = Reals(t.detach()).clone();
    own.exp_avg = torch::zeros_like(own.master);
    own.exp_avg_sq = torch::zeros_like(own.master);
    parameters_.push_back(std::move(own));
  }
  if (recipe_.libtorch_exact) {
    std::vector<Tensor> all;
    for (const Parameter& p : parameters_) all.push_back(p.master);
    optimizer_ = std::make_unique<torch::optim::AdamW>(
        all, torch::optim::AdamWOptions(kRate).weight_decay(kWeightDecay));
  }
  if (recipe_.dtype == "fp16") scale_ = kLossScale;
  if (recipe_.dtype != "fp32") Convert();
}

void PlainTraining::Convert() {
  const at::ScalarType dtype =
      recipe_.dtype == "bf16" ? at::kBFloat16 : at::kHalf;
  for (const auto& m : module_->modules()) {
    if (recipe_.fp32_norms && IsNorm(*m)) continue;
    for (Tensor& p : m->parameters(/*recurse=*/false)) {
      if (p.is_floating_point()) p.set_data(p.to(dtype));
    }
  }
}

void PlainTraining::Backward(const Tensor& loss, Loss options) {
  const double seed = scale_ / recipe_.accumulation;
  loss.backward(seed == 1 ? Tensor() : torch::full_like(loss, seed),
                options.retain_graph);
  Reduce();
}

// Reduces as DistributedDataParallel does, by an all-gather.
void PlainTraining::Reduce() {
  torch::NoGradGuard no_grad;
  std::string mine;
  for (const Parameter& p : parameters_) {
    const Tensor gradient = p.tensor.grad();
    mine.push_back(gradient.defined() ? 1 : 0);
    if (!gradient.defined()) continue;
    const Tensor send = Reals(gradient.to_dense()).contiguous();
    mine.append(static_cast<const char*>(send.const_data_ptr()), send.nbytes());
    p.tensor.mutable_grad().reset();
  }
  const auto all = comm_->AllGatherStrings(mine, CommTag{"zoo"});
  ThrowIfError(all.status());
  std::vector<size_t> at(all->size(), 0);
  for (Parameter& p : parameters_) {
    std::vector<std::string> sent;
    for (size_t r = 0; r < all->size(); ++r) {
      const size_t has = static_cast<size_t>((*all)[r][at[r]++]);
      const size_t bytes = has * p.tensor.nbytes();
      sent.push_back((*all)[r].substr(at[r], bytes));
      at[r] += bytes;
    }
    Average(&p, sent);
  }
}

void PlainTraining::Average(Parameter* p,
                            const std::vector<std::string>& sent) const {
  const at::ScalarType dtype = p->tensor.is_complex() ? p->master.scalar_type()
                                                      : p->tensor.scalar_type();
  bool any = false;
  Tensor sum;
  for (const std::string& bytes : sent) {
    any |= !bytes.empty();
    Tensor term = torch::zeros(p->master.sizes(), dtype);
    if (!bytes.empty()) {
      memcpy(term.mutable_data_ptr(), bytes.data(), bytes.size());
    }
    if (Is16Bit(dtype)) term = term.to(at::kFloat);
    sum = sum.defined() ? sum + term : term;
  }
  if (!any) return;
  const Tensor mean = sum.to(dtype)
                          .to(p->master.scalar_type())
                          .div(static_cast<double>(sent.size()));
  p->gradient = p->gradient.defined() ? p->gradient + mean : mean;
}

// Returns the factor of gradients for the loss scale and clipping.
double PlainTraining::Factor() const {
  if (recipe_.clipping == 0) return 1 / scale_;
  long double squares = 0;
  for (const Parameter& p : parameters_) {
    if (!p.gradient.defined()) continue;
    const Tensor values = p.gradient.to(at::kDouble).reshape({-1});
    const double* const v = values.const_data_ptr<double>();
    for (int64_t i = 0; i < values.numel(); ++i) {
      squares += static_cast<long double>(v[i]) * v[i];
    }
  }
  const double norm = static_cast<double>(std::sqrt(squares)) / scale_;
  if (norm + 1e-6 <= recipe_.clipping) return 1 / scale_;
  return 1 / scale_ * (recipe_.clipping / (norm + 1e-6));
}

void PlainTraining::Step() {
  if (++micro_batches_ % recipe_.accumulation != 0) return;
  torch::NoGradGuard no_grad;
  const double factor = Factor();
  for (Parameter& p : parameters_) {
    if (!p.gradient.defined()) continue;
    const Tensor values = Reals(p.tensor.detach());
    // These are the program's values.
    const Tensor rounded = p.master.to(values.scalar_type());
    p.master.copy_(torch::where(rounded == values, p.master,
                                values.to(p.master.scalar_type())));
    if (factor != 1) p.gradient = p.gradient.mul(factor);
    ++p.steps;
    if (optimizer_ != nullptr) {
      p.master.mutable_grad() = p.gradient;
    } else {
      FusedAdamW(p.master, p.exp_avg, p.exp_avg_sq, p.gradient, p.steps, rate_);
    }
  }
  if (optimizer_ != nullptr) {
    optimizer_->step();
    optimizer_->zero_grad();
  }
  for (Parameter& p : parameters_) {
    if (!p.gradient.defined()) continue;
    Reals(p.tensor.detach()).copy_(p.master);
    p.gradient.reset();
  }
}

Tensor PlainTraining::UnderAutocast(const std::function<Tensor()>& forward) {
  if (recipe_.autocast.empty()) return forward();
  at::autocast::set_autocast_enabled(at::kCPU, true);
  at::autocast::set_autocast_dtype(at::kCPU, at::kBFloat16);
  at::autocast::increment_nesting();
  const Tensor loss = forward();
  if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
  at::autocast::set_autocast_enabled(at::kCPU, false);
  return loss;
}

// Sets 16-bit parameters to their masters.
void PlainTraining::Close() {
  torch::NoGradGuard no_grad;
  for (Parameter& p : parameters_) {
    if (p.tensor.is_complex() || !Is16Bit(p.tensor.scalar_type())) continue;
    const Tensor values = p.tensor.to(at::kFloat);
    p.tensor.set_data(p.steps == 0 && !p.tensor.requires_grad() ? values
                                                                : p.master);
  }
}

class PlainRig : public Rig {
 public:
  explicit PlainRig(std::shared_ptr<Communicator> comm)
      : Rig(comm->rank(), /*plain=*/true), comm_(std::move(comm)) {}

 private:
  std::unique_ptr<Training> Make(std::shared_ptr<nn::Module> module,
                                 const Recipe& recipe) override {
    return std::make_unique<PlainTraining>(std::move(module), recipe, comm_);
  }

  const std::shared_ptr<Communicator> comm_;
  const PlainAutograd autograd_;
};

}  // namespace

std::unique_ptr<Rig> MakePlainRig(std::shared_ptr<Communicator> comm) {
  return std::make_unique<PlainRig>(std::move(comm));
}

}  // namespace tessera::zoo
