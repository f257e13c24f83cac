// DeviceRun trains a small net step by step on a device without hardware
// (testing/device/test_device.h) with its kernels, or on the CPU; for tests of
// what happens in single steps.
#ifndef TESTS_EQUIVALENCE_DEVICE_RUN_H_
#define TESTS_EQUIVALENCE_DEVICE_RUN_H_

#include <torch/torch.h>

#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "base/status.h"
#include "comm/communicator.h"
#include "comm/world/world.h"
#include "engine/engine.h"
#include "testing/device/test_device.h"
#include "tests/support/device_group.h"
#include "tests/support/device_kernels.h"
#include "tests/support/training.h"

namespace tessera {

// A loss multiplied by this overflows in any dtype.
inline constexpr double kOverflow = std::numeric_limits<double>::infinity();
inline constexpr int kFp32 = -1, kBf16 = -2;

struct DeviceNetImpl : torch::nn::Module {
  DeviceNetImpl() {
    a = register_module("a", torch::nn::Linear(6, 9));
    b = register_module("b", torch::nn::Linear(9, 5));
  }
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor h = torch::tanh(a(x.to(a->weight.scalar_type())));
    return b(h).to(at::kFloat).square().mean();
  }
  torch::nn::Linear a{nullptr}, b{nullptr};
};
TORCH_MODULE(DeviceNet);

// The settings of a run.
struct Way {
  std::string device = "1";  // "" (the CPU), "1", "1/workers"
  int stage = 0;
  double clipping = 0;
  double norm = 2;   // the norm by which is clipped
  int fp16 = kFp32;  // the power of the first scale, or one of these
  int shard_group = 0;
  // What is offloaded to the host: 1: states, 2: parameters, too; 3: these to a
  // disk.
  int offload = 0;
  std::string states = "fp32";  // optimizer.params.state_dtype
  std::string optimizer = "AdamW";
  bool overlap = false;  // zero_optimization.overlap_comm, if it is true
};

inline std::string TextOf(const Way& way) {
  return absl::StrJoin(
      {way.device, absl::StrCat(way.stage), absl::StrCat(way.clipping),
       absl::StrCat(way.norm), absl::StrCat(way.fp16),
       absl::StrCat(way.shard_group), absl::StrCat(way.offload), way.states,
       way.optimizer, absl::StrCat(way.overlap)},
      " ");
}

inline Way WayOf(absl::string_view text) {
  const std::vector<std::string> words = absl::StrSplit(text, ' ');
  return {words[0],
          std::stoi(words[1]),
          std::stod(words[2]),
          std::stod(words[3]),
          std::stoi(words[4]),
          std::stoi(words[5]),
          std::stoi(words[6]),
          words[7],
          words[8],
          words[9] == "1"};
}

inline proto::Config ConfigOf(const Way& way) {
  proto::Config config;
  config.set_train_micro_batch_size_per_gpu(1);
  config.set_gradient_clipping(way.clipping);
  config.set_gradient_clipping_norm(way.norm);
  config.mutable_optimizer()->set_type(way.optimizer);
  config.mutable_optimizer()->mutable_params()->set_state_dtype(way.states);
  config.mutable_zero_optimization()->set_stage(way.stage);
  config.mutable_zero_optimization()->set_stage3_max_reuse_distance(0);
  config.mutable_zero_optimization()->set_stage3_param_persistence_threshold(0);
  if (way.overlap) config.mutable_zero_optimization()->set_overlap_comm(true);
  if (way.shard_group > 0) {
    config.mutable_sharding()->set_shard_group_size(way.shard_group);
  }
  proto::ZeroOptimization* const zero = config.mutable_zero_optimization();
  if (way.offload > 0) zero->mutable_offload_optimizer()->set_device("cpu");
  proto::OffloadParam* const parameters = zero->mutable_offload_param();
  if (way.offload == 2) parameters->set_device("cpu");
  if (way.offload == 3) {
    parameters->set_device("nvme");
    parameters->set_nvme_path(TrainingSpec::SwapFolder());
    parameters->set_max_in_cpu(0);
  }
  config.mutable_sharding()->mutable_offload()->set_min_state_bytes(0);
  if (way.fp16 == kBf16) {
    config.mutable_bf16()->set_enabled(true);
    config.mutable_bf16()->set_check_grad_overflow(true);
  }
  if (way.fp16 < 0) return config;
  proto::Fp16* const fp16 = config.mutable_fp16();
  fp16->set_enabled(true);
  fp16->set_initial_scale_power(way.fp16);
  fp16->set_hysteresis(1);
  fp16->set_loss_scale_window(2);
  return config;
}

// Returns the ranks of `world`, with the device's collectives if there is a
// device.
inline absl::StatusOr<std::shared_ptr<Communicator>> GroupOf(
    const Way& way, const World& world) {
  if (way.device.empty()) return world.communicator();
  testdevice::Register({});
  return DeviceGroup(world.communicator(), testdevice::TestDevice(1));
}

// A net, its engine and its input, which is the same in all steps.
struct DeviceRun {
  static absl::StatusOr<DeviceRun> Make(const Way& way, const World& world) {
    TESSERA_ASSIGN_OR_RETURN(std::shared_ptr<Communicator> comm,
                             GroupOf(way, world));
    return Make(way, std::move(comm));
  }
  static absl::StatusOr<DeviceRun> Make(const Way& way,
                                        std::shared_ptr<Communicator> comm) {
    torch::manual_seed(1);
    DeviceRun run;
    EngineOptions options;
    if (!way.device.empty()) {
      RegisterTestDeviceKernels();
      testdevice::SetMode(way.device == "1" ? testdevice::Mode::kAtOnce
                                            : testdevice::Mode::kWorkers);
      testdevice::ClearFaults();
      options.device = testdevice::TestDevice(1);
    }
    options.communicator = std::move(comm);
    TESSERA_ASSIGN_OR_RETURN(
        run.engine, Engine::Create(run.net.ptr(), ConfigOf(way), options));
    run.x = torch::randn({4, 6});
    if (options.device.has_value()) run.x = run.x.to(*options.device);
    return run;
  }

  // Multiplies the loss by `factor`.
  absl::Status Backward(double factor = 1) {
    return engine->Backward(net->forward(x) * factor);
  }
  absl::Status TrainStep(double factor = 1) {
    TESSERA_RETURN_IF_ERROR(Backward(factor));
    return engine->Step();
  }
  // Returns all observable state of the engine.
  absl::StatusOr<std::string> State() {
    TESSERA_ASSIGN_OR_RETURN(Record record, ParametersOf(*engine, *net));
    const StepReport& last = engine->last_step();
    record.push_back(absl::StrCat("steps ", engine->step(), " skipped ",
                                  last.skipped_steps, " last ", last.skipped,
                                  " scale ", last.loss_scale, " norm ",
                                  last.grad_norm, " ", last.clipped_norm));
    return ToText(record);
  }
  // Returns State(), and closes the engine.
  absl::StatusOr<std::string> Finish() {
    TESSERA_ASSIGN_OR_RETURN(const std::string state, State());
    TESSERA_RETURN_IF_ERROR(engine->Close());
    if (!x.is_cpu()) {
      testdevice::CheckFreed();
      testdevice::SetMode(testdevice::Mode::kAtOnce);
      for (const auto& fault : testdevice::Faults()) {
        return absl::InternalError(fault.message);
      }
    }
    return state;
  }

  DeviceNet net;
  std::unique_ptr<Engine> engine;
  at::Tensor x;
};

}  // namespace tessera
#endif  // TESTS_EQUIVALENCE_DEVICE_RUN_H_
