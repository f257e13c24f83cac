#include "tests/oracle.h"

#include <torch/torch.h>

#include <algorithm>
#include <utility>

namespace tessera {
namespace {

at::Generator DefaultGenerator() {
  return at::detail::getDefaultCPUGenerator();
}

// The default generator is what it was again at the end of the scope.
class KeepGenerator {
 public:
  KeepGenerator() : state_(DefaultGenerator().get_state()) {}
  ~KeepGenerator() { DefaultGenerator().set_state(state_); }

 private:
  at::Tensor state_;
};

}  // namespace

struct Oracle::Rank {
  std::shared_ptr<torch::nn::Module> module;
  at::Tensor generator_state;
};

// One parameter on all ranks. The optimizer works on rank 0's.
struct Oracle::Parameter {
  std::string name;
  std::vector<at::Tensor> replicas;  // by rank
  at::Tensor gradient;               // of the step; undefined: skipped
  at::Tensor exp_avg, exp_avg_sq;
  int64_t steps = 0;
};

Oracle::Oracle(const MakeModule& make_module, OracleOptions options)
    : options_(options) {
  at::set_num_threads(1);
  KeepGenerator keep;
  for (int r = 0; r < options_.world_size; ++r) {
    torch::manual_seed(options_.model_seed);
    Rank rank;
    rank.module = make_module();
    torch::manual_seed(options_.rank_seed + static_cast<uint64_t>(r));
    rank.generator_state = DefaultGenerator().get_state();
    size_t distinct = 0;
    std::vector<at::Tensor> seen;
    for (const auto& entry : rank.module->named_parameters()) {
      const at::Tensor& t = entry.value();
      if (t.numel() == 0) continue;
      if (std::any_of(seen.begin(), seen.end(),
                      [&](const at::Tensor& s) { return s.is_same(t); })) {
        continue;
      }
      seen.push_back(t);
      if (r == 0) {
        parameters_.emplace_back();
        parameters_.back().name = entry.key();
        parameters_.back().exp_avg = torch::zeros_like(t);
        parameters_.back().exp_avg_sq = torch::zeros_like(t);
      }
      parameters_[distinct++].replicas.push_back(t);
    }
    ranks_.push_back(std::move(rank));
  }
}

Oracle::~Oracle() = default;

void Oracle::AddMicroBatch(const Loss& loss,
                           std::vector<std::vector<at::Tensor>>* losses) {
  for (int r = 0; r < options_.world_size; ++r) {
    Rank& rank = ranks_[r];
    DefaultGenerator().set_state(rank.generator_state);
    at::Tensor value = loss(*rank.module, r, micro_batches_);
    if (options_.accumulation > 1) {
      value.backward(torch::full_like(value, 1.0 / options_.accumulation));
    } else {
      value.backward();
    }
    (*losses)[r].push_back(value.detach());
    rank.generator_state = DefaultGenerator().get_state();
  }
  ++micro_batches_;
  torch::NoGradGuard no_grad;
  for (Parameter& p : parameters_) {
    const bool any =
        std::any_of(p.replicas.begin(), p.replicas.end(),
                    [](const at::Tensor& t) { return t.grad().defined(); });
    if (!any) continue;
    at::Tensor sum;
    for (at::Tensor& replica : p.replicas) {
      at::Tensor mine = replica.grad().defined()
                            ? replica.grad().to_dense().clone()
                            : torch::zeros_like(replica);
      sum = sum.defined() ? sum + mine : mine;
      replica.mutable_grad().reset();
    }
    const at::Tensor mean = sum.div(options_.world_size);
    p.gradient = p.gradient.defined() ? p.gradient + mean : mean;
  }
}

void Oracle::StepOptimizer() {
  torch::NoGradGuard no_grad;
  std::vector<at::Tensor> params, gradients, exp_avgs, exp_avg_sqs, steps;
  for (Parameter& p : parameters_) {
    if (!p.gradient.defined()) continue;
    ++p.steps;
    params.push_back(p.replicas[0]);
    gradients.push_back(p.gradient);
    exp_avgs.push_back(p.exp_avg);
    exp_avg_sqs.push_back(p.exp_avg_sq);
    steps.push_back(torch::full({}, static_cast<double>(p.steps)));
  }
  if (params.empty()) return;
  at::_fused_adamw_(params, gradients, exp_avgs, exp_avg_sqs,
                    /*max_exp_avg_sqs=*/{}, steps, options_.lr, options_.beta1,
                    options_.beta2, options_.weight_decay, options_.eps,
                    /*amsgrad=*/false, /*maximize=*/false);
  for (Parameter& p : parameters_) {
    for (size_t r = 1; r < p.replicas.size(); ++r) {
      p.replicas[r].copy_(p.replicas[0]);
    }
  }
}

std::vector<std::vector<at::Tensor>> Oracle::TrainStep(const Loss& loss) {
  KeepGenerator keep;
  for (Parameter& p : parameters_) p.gradient.reset();
  std::vector<std::vector<at::Tensor>> losses(ranks_.size());
  for (int i = 0; i < options_.accumulation; ++i) AddMicroBatch(loss, &losses);
  StepOptimizer();
  return losses;
}

const Oracle::Parameter& Oracle::Find(absl::string_view name) const {
  auto it = std::find_if(parameters_.begin(), parameters_.end(),
                         [&](const Parameter& p) { return p.name == name; });
  TORCH_CHECK(it != parameters_.end(), "no parameter ", std::string(name));
  return *it;
}

std::vector<std::string> Oracle::parameter_names() const {
  std::vector<std::string> names;
  for (const Parameter& p : parameters_) names.push_back(p.name);
  return names;
}

at::Tensor Oracle::parameter(absl::string_view name) const {
  return Find(name).replicas[0].detach();
}

at::Tensor Oracle::gradient(absl::string_view name) const {
  return Find(name).gradient;
}

torch::nn::Module& Oracle::module(int rank) const {
  return *ranks_[rank].module;
}

at::Tensor Oracle::generator_state(int rank) const {
  return ranks_[rank].generator_state;
}

}  // namespace tessera
