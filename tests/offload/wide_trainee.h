// WideTrainee is a Trainee of a model whose units are several slices each, so
// that an update takes longer than the call after Step. This file also has what
// tests of offload look at, and finds open swap files of this process.
#ifndef TESTS_OFFLOAD_WIDE_TRAINEE_H_
#define TESTS_OFFLOAD_WIDE_TRAINEE_H_

#include <fcntl.h>
#include <torch/torch.h>
#include <unistd.h>

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "base/torch_guard.h"
#include "tests/models/models.h"
#include "tests/support/trainee.h"
#include "tests/support/training.h"

namespace tessera {

struct WideBlockImpl : torch::nn::Module {
  WideBlockImpl() {
    norm = register_module(
        "norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({kDim})));
    up = register_module("up", torch::nn::Linear(kDim, kDim));
  }
  at::Tensor forward(const at::Tensor& x) {
    return x + torch::tanh(up(norm(x)));
  }
  static constexpr int64_t kDim = 192;
  torch::nn::LayerNorm norm{nullptr};
  torch::nn::Linear up{nullptr};
};
TORCH_MODULE(WideBlock);

// Has four blocks, the second of which requires no gradient at first.
class WideModel : public TestModel {
 public:
  WideModel() {
    for (int i = 0; i < 4; ++i) blocks_->push_back(WideBlock());
    register_module("blocks", blocks_);
    head_ = register_module("head", torch::nn::Linear(WideBlockImpl::kDim, 7));
    register_buffer("calls", torch::zeros({1}));
    Freeze(1, true);
  }
  void Freeze(size_t block, bool frozen) {
    for (at::Tensor& p : blocks_[block]->parameters()) {
      p.requires_grad_(!frozen);
    }
  }
  at::Tensor Loss(int rank, int64_t micro_batch) override {
    named_buffers()["calls"].add_(1);
    at::Generator generator = at::detail::createCPUGenerator(
        static_cast<uint64_t>(1000 * micro_batch + rank));
    at::Tensor h = torch::randn({6, WideBlockImpl::kDim}, generator)
                       .to(blocks_->parameters()[0].device(), dtype());
    for (const auto& block : *blocks_) {
      h = block->as<WideBlock>()->forward(h);
    }
    return head_(torch::dropout(h, 0.1, is_training()))
        .to(torch::kFloat)
        .pow(2)
        .mean();
  }

 private:
  torch::nn::ModuleList blocks_;
  torch::nn::Linear head_{nullptr};
};

// Builds the model as every rank does; then the default generator is the
// rank's.
inline std::shared_ptr<WideModel> WideModelOf(int rank, uint64_t seed = 5) {
  at::set_num_threads(1);
  torch::manual_seed(seed);
  auto model = std::make_shared<WideModel>();
  torch::manual_seed(700 + static_cast<uint64_t>(rank));
  return model;
}

// Makes the trainee. COLLECTIVE. `seed` determines the values.
inline absl::StatusOr<Trainee> MakeWide(const TrainingSpec& spec,
                                        std::shared_ptr<Communicator> comm,
                                        uint64_t seed = 5) {
  return Trainee::Make(WideModelOf(comm->rank(), seed), ConfigOf(spec), comm);
}

// Makes it on TrainingSpec::device.
inline absl::StatusOr<Trainee> MakeWideOnDevice(
    const TrainingSpec& spec, std::shared_ptr<Communicator> comm) {
  PrepareDevice(spec, comm->rank());
  TESSERA_ASSIGN_OR_RETURN(comm, CommunicatorOf(spec, std::move(comm)));
  Trainee t;
  t.rank = comm->rank();
  t.model = WideModelOf(t.rank);
  TESSERA_ASSIGN_OR_RETURN(t.engine,
                           MakeEngine(t.model, spec, std::move(comm)));
  return t;
}

// Where states and parameters lie, as in TrainingSpec.
struct OffloadWay {
  const char* name;
  double states;
  int64_t parameters;
  const char* shared = "auto";
  const char* served = "auto";

  TrainingSpec Spec(const std::string& dtype) const {
    TrainingSpec spec;
    spec.stage = 3;
    spec.dtype = dtype;
    spec.states_on_disk = states;
    spec.parameters_in_memory = parameters;
    spec.shared = shared;
    spec.served = served;
    return spec;
  }
};
inline constexpr OffloadWay kInMemory = {"Memory", -1, -1};
inline constexpr OffloadWay kAllOnDisk = {"All", 1, 0};
inline TrainingSpec OnDisk() { return kAllOnDisk.Spec("bf16"); }

// Returns a configuration with the swap files in a folder of the test.
inline proto::Config ConfigIn(const std::string& folder,
                              const TrainingSpec& spec) {
  proto::Config config = ConfigOf(spec);
  proto::ZeroOptimization* const zero = config.mutable_zero_optimization();
  if (spec.states_on_disk >= 0) {
    zero->mutable_offload_optimizer()->set_nvme_path(folder);
  }
  if (spec.parameters_in_memory >= 0) {
    zero->mutable_offload_param()->set_nvme_path(folder);
  }
  return config;
}
inline absl::StatusOr<Trainee> MakeWideIn(const std::string& folder,
                                          const TrainingSpec& spec,
                                          std::shared_ptr<Communicator> comm,
                                          uint64_t seed = 5) {
  return Trainee::Make(WideModelOf(comm->rank(), seed), ConfigIn(folder, spec),
                       comm);
}

inline WideModel& Wide(const Trainee& t) {
  return dynamic_cast<WideModel&>(*t.model);
}

// Runs steps of the micro-batches [first, end), and records their losses.
inline absl::Status TrainWide(Trainee* t, int first, int end, Record* record) {
  for (int step = first; step < end; ++step) {
    // A forward throws what a gather throws.
    TESSERA_ASSIGN_OR_RETURN(const at::Tensor loss, CatchTorch("forward", [&] {
                               return t->Loss(step);
                             }));
    TESSERA_RETURN_IF_ERROR(t->engine->Backward(loss));
    TESSERA_RETURN_IF_ERROR(t->engine->Step());
    record->push_back(LossLine(step, 0, loss));
  }
  return absl::OkStatus();
}

// Records all values: masters, states, working copies, the buffer. COLLECTIVE.
inline absl::Status AddValues(Trainee* t, Record* record) {
  const auto add = [&](const std::string& name, const at::Tensor& value) {
    record->push_back(ParameterLine(name, value));
  };
  for (const auto& p : t->model->named_parameters()) {
    const std::string& name = p.key();
    TESSERA_ASSIGN_OR_RETURN(const at::Tensor master, t->engine->Master(name));
    add(name + " master", master);
    TESSERA_ASSIGN_OR_RETURN(const at::Tensor copy, t->engine->Parameter(name));
    add(name, copy);
    for (const auto which : {"exp_avg", "z", "exp_avg_sq"}) {
      const auto state = t->engine->OptimizerStateOf(name, which);
      if (absl::IsFailedPrecondition(state.status())) continue;  // frozen
      if (absl::IsNotFound(state.status())) continue;  // another optimizer's
      TESSERA_RETURN_IF_ERROR(state.status());
      add(name + " state", *state);
    }
  }
  add("calls", t->model->named_buffers()["calls"]);
  record->push_back(absl::StrCat("step ", t->engine->step()));
  return absl::OkStatus();
}

inline std::vector<std::string> NamesIn(const std::string& folder) {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    names.push_back(entry.path().filename().string());
  }
  return names;
}

// Multiplies through a pointer, which no operator sees.
inline void Triple(const at::Tensor& t) {
  const auto triple = [&](auto* data) {
    for (int64_t i = 0; i < t.numel(); ++i) data[i] = data[i] * 3;
  };
  if (t.scalar_type() == torch::kFloat) {
    triple(t.data_ptr<float>());
  } else {
    triple(t.data_ptr<at::BFloat16>());
  }
}

// Returns the descriptors of files without a name.
inline std::vector<int> OpenSwapFiles() {
  std::vector<int> found;
  for (const auto& entry :
       std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code error;
    const auto link = std::filesystem::read_symlink(entry.path(), error);
    if (absl::StrContains(link.string(), "/tessera-swap-")) {
      found.push_back(std::stoi(entry.path().filename().string()));
    }
  }
  return found;
}

}  // namespace tessera
#endif  // TESTS_OFFLOAD_WIDE_TRAINEE_H_
