// Measures the update of states that a model on a device keeps on the host: the
// engine's own, through its update stream, in Step and early (as gradients
// arrive in backward), beside STREAM's triad by as many threads.
//
//   bazel run -c opt //benchmarks:host_update -- --numel=67108864 --rounds=11
//
// The device has no hardware (testing/device): its memory is the host's, so the
// new values that go up are copied in memory, where a GPU's copy engine would
// read them. That is part of what is measured. The model computes nothing, or
// early updates would share the processors with what a GPU computes.
//
// Where parameters are on the host, too ("at rest"), nothing goes up: that is
// the update alone.
//
// bytes: what a parameter needs: the gradient read, the master and two moments
// read and written, in bf16 its new value written once, and that read and
// written once by the copy to the device. Steps and triads take turns.
// Prints one line of JSON for each figure: medians over rounds, of GB/s and of
// the rounds' ratios to the triad's GB/s, counted with what it reads before it
// writes.
#include <torch/torch.h>

#include <cstdio>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/usage.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "base/status.h"
#include "base/torch_guard.h"
#include "benchmarks/program.h"
#include "benchmarks/workers.h"
#include "comm/group/self_communicator.h"
#include "config/config.pb.h"
#include "engine/engine.h"
#include "optim/algorithms/coefficients.h"
#include "optim/algorithms/optimizer_options.h"
#include "optim/kernels/element_step.h"
#include "testing/device/test_device.h"

ABSL_FLAG(int64_t, numel, int64_t{1} << 26, "Parameters.");
ABSL_FLAG(int64_t, units, 8, "Units that they are in.");
ABSL_FLAG(int, threads, 2, "Threads of the update, and of the triad.");
ABSL_FLAG(int, rounds, 11, "Rounds that are measured, after two that are not.");

namespace tessera {
namespace {

struct Unit : torch::nn::Module {
  explicit Unit(int64_t numel)
      : value(register_parameter("value", torch::ones({numel}))) {}
  at::Tensor value;
};

// Returns a number that depends on `value`, whose gradient is `gradient`.
struct Given : torch::autograd::Function<Given> {
  static at::Tensor forward(torch::autograd::AutogradContext* context,
                            const at::Tensor& value,
                            const at::Tensor& gradient) {
    context->saved_data["gradient"] = gradient;
    return value.narrow(0, 0, 1).sum(at::kFloat);
  }
  static torch::autograd::variable_list backward(
      torch::autograd::AutogradContext* context,
      const torch::autograd::variable_list&) {
    return {context->saved_data["gradient"].toTensor(), at::Tensor()};
  }
};

// Its gradients are there before: nothing is computed.
struct Model : torch::nn::Module {
  Model(int64_t units, int64_t numel) {
    for (int64_t i = 0; i < units; ++i) {
      parts.push_back(register_module(absl::StrCat("unit", i),
                                      std::make_shared<Unit>(numel)));
    }
  }
  at::Tensor Loss() {
    at::Tensor loss;
    for (const auto& unit : parts) {
      if (!gradient_.defined()) gradient_ = at::ones_like(unit->value.detach());
      const at::Tensor part = Given::apply(unit->value, gradient_);
      loss = loss.defined() ? loss + part : part;
    }
    return loss;
  }
  std::vector<std::shared_ptr<Unit>> parts;

 private:
  at::Tensor gradient_;
};

struct Case {
  std::string name;
  bool bf16 = false;
  bool early = false;
  bool at_rest = false;  // parameters are on the host

  // Returns the bytes that an element's update moves, read and written.
  double bytes() const {
    const int value = bf16 ? 2 : 4;  // and the gradient, of one rank
    return value + 24 + (bf16 ? value : 0) + (at_rest ? 0 : 2 * value);
  }
};

proto::Config ConfigOf(const Case& how) {
  proto::Config config;
  config.set_train_micro_batch_size_per_gpu(1);
  config.set_gradient_clipping(0);
  config.mutable_optimizer()->set_type("AdamW");
  config.mutable_bf16()->set_enabled(how.bf16);
  auto* const zero = config.mutable_zero_optimization();
  zero->set_stage(how.at_rest ? 3 : 2);
  zero->set_overlap_comm(false);  // a step's report has all of its update
  if (how.at_rest) zero->mutable_offload_param()->set_device("cpu");
  zero->mutable_offload_optimizer()->set_device("cpu");
  zero->mutable_offload_optimizer()->set_cpuadam_cores_perc(1);
  auto* const offload = config.mutable_sharding()->mutable_offload();
  offload->set_min_state_bytes(0);
  offload->set_early_step(how.early);
  offload->set_early_bytes(int64_t{1} << 40);
  config.mutable_sharding()->add_unit_classes("Unit");
  return config;
}

// Trains by one of the cases.
class Training {
 public:
  static absl::StatusOr<Training> Make(const Case& how) {
    Training t;
    t.how_ = how;
    const int64_t units = absl::GetFlag(FLAGS_units);
    t.model_ =
        std::make_shared<Model>(units, absl::GetFlag(FLAGS_numel) / units);
    EngineOptions options;
    options.communicator = MakeSelfCommunicator();
    options.device = testdevice::TestDevice(1);
    TESSERA_ASSIGN_OR_RETURN(t.engine_,
                             Engine::Create(t.model_, ConfigOf(how), options));
    return t;
  }

  // GB/s of the arithmetic's thread in one step.
  absl::StatusOr<double> Step() {
    TESSERA_RETURN_IF_ERROR(engine_->Backward(model_->Loss()));
    TESSERA_RETURN_IF_ERROR(engine_->Step());
    const OffloadReport& report = engine_->last_step().offload;
    if (how_.early && steps_++ > 1 && report.early_units == 0) {
      return absl::InternalError("no unit was stepped early");
    }
    return how_.bytes() * static_cast<double>(absl::GetFlag(FLAGS_numel)) /
           absl::ToDoubleNanoseconds(report.computing);
  }
  absl::Status Close() { return engine_->Close(); }
  const Case& how() const { return how_; }

  std::vector<double> speeds;

 private:
  Case how_;
  std::shared_ptr<Model> model_;
  std::unique_ptr<Engine> engine_;
  int steps_ = 0;
};

// GB/s of 16 bytes an element.
class TriadRun {
 public:
  TriadRun()
      : workers_(absl::GetFlag(FLAGS_threads)),
        numel_(absl::GetFlag(FLAGS_numel)),
        memory_(torch::ones({3, numel_})) {}
  double Run() {
    float* const a = memory_.data_ptr<float>();
    const double begin = SecondsOf(CLOCK_MONOTONIC);
    workers_.Run(numel_, [&](int64_t from, int64_t to) {
      Triad(a + from, a + numel_ + from, a + 2 * numel_ + from, 3.0f,
            to - from);
    });
    return 16e-9 * static_cast<double>(numel_) /
           (SecondsOf(CLOCK_MONOTONIC) - begin);
  }

 private:
  Workers workers_;
  const int64_t numel_;
  const at::Tensor memory_;
};

// The arithmetic of an update alone (StepElements), by the triad's threads:
// what is left of a processor where a device computes, while early updates
// above share theirs with the device that has no hardware.
class ElementsRun {
 public:
  ElementsRun(bool bf16, bool elsewhere)
      : bf16_(bf16),
        elsewhere_(elsewhere),
        workers_(absl::GetFlag(FLAGS_threads)),
        numel_(absl::GetFlag(FLAGS_numel)),
        old_(torch::zeros({3, numel_})),
        new_(torch::zeros({elsewhere ? 3 : 1, numel_})),
        gradient_(torch::ones({numel_}, bf16 ? at::kBFloat16 : at::kFloat)),
        working_(torch::zeros({numel_}, at::kBFloat16)) {}

  double Run() {
    const StepCoefficients with = CoefficientsOf(OptimizerOptions(), 7);
    StepRange range = RangeOf(old_);
    if (elsewhere_) {
      range.new_master = new_[0].data_ptr();
      range.new_states[0] = new_[1].data_ptr();
      range.new_states[1] = new_[2].data_ptr();
      range.past_caches = true;
    }
    const double begin = SecondsOf(CLOCK_MONOTONIC);
    workers_.Run(numel_ / 64, [&](int64_t from, int64_t end) {
      StepElements(Formula::kAdamW, Part(range, 64 * from, 64 * end), with);
    });
    const double seconds = SecondsOf(CLOCK_MONOTONIC) - begin;
    if (elsewhere_) std::swap(old_, new_);
    return bytes() * 1e-9 * static_cast<double>(numel_) / seconds;
  }
  // As a Case's at rest: 2 + 24 + 2, or 4 + 24.
  static double bytes() { return 28; }
  std::string name() const {
    return absl::StrCat(bf16_ ? "bf16" : "fp32", ", elements ",
                        elsewhere_ ? "elsewhere" : "in place");
  }

  std::vector<double> speeds;

 private:
  StepRange RangeOf(const at::Tensor& states) {
    StepRange range;
    range.master = states[0].data_ptr();
    range.states[0] = states[1].data_ptr();
    range.states[1] = states[2].data_ptr();
    range.gradient = gradient_.data_ptr();
    range.numel = numel_;
    if (!bf16_) return range;
    range.gradient_type = range.working_type = NumberType::kBFloat16;
    range.working = working_.data_ptr();
    return range;
  }

  const bool bf16_, elsewhere_;
  Workers workers_;
  const int64_t numel_;
  at::Tensor old_, new_;
  const at::Tensor gradient_, working_;
};

absl::Status Run(int argc, char** argv) {
  TESSERA_RETURN_IF_ERROR(ReadFlags(argc, argv));
  TESSERA_RETURN_IF_ERROR(
      AtLeast(1, FLAGS_numel, FLAGS_units, FLAGS_threads, FLAGS_rounds));
  at::set_num_threads(absl::GetFlag(FLAGS_threads));
  testdevice::Register({});
  testdevice::SetMode(testdevice::Mode::kAtOnce);
  TriadRun triad;
  std::vector<double> triads;
  std::vector<Training> trainings;
  std::vector<std::unique_ptr<ElementsRun>> elements;
  for (const bool bf16 : {false, true}) {
    for (const bool elsewhere : {false, true}) {
      elements.push_back(std::make_unique<ElementsRun>(bf16, elsewhere));
    }
  }
  for (const Case& how :
       {Case{"fp32, in Step"}, Case{"fp32, early", false, true},
        Case{"bf16, in Step", true}, Case{"bf16, early", true, true},
        Case{"fp32, in Step, at rest", false, false, true},
        Case{"fp32, early, at rest", false, true, true},
        Case{"bf16, in Step, at rest", true, false, true},
        Case{"bf16, early, at rest", true, true, true}}) {
    TESSERA_ASSIGN_OR_RETURN(Training training, Training::Make(how));
    trainings.push_back(std::move(training));
  }
  for (int round = -2; round < absl::GetFlag(FLAGS_rounds); ++round) {
    const double speed = triad.Run();
    if (round >= 0) triads.push_back(speed);
    for (const auto& run : elements) {
      const double gb = run->Run();
      if (round >= 0) run->speeds.push_back(gb);
    }
    for (Training& training : trainings) {
      TESSERA_ASSIGN_OR_RETURN(const double gb, training.Step());
      if (round >= 0) training.speeds.push_back(gb);
    }
  }
  std::printf("{\"name\": \"triad\", \"gb_per_s\": %.2f}\n", Median(triads));
  const auto print = [&](const std::string& name, double bytes,
                         const std::vector<double>& speeds) {
    std::printf(
        "{\"name\": \"%s\", \"bytes\": %.0f, \"gb_per_s\": %.2f, "
        "\"of_triad\": %.3f}\n",
        name.c_str(), bytes, Median(speeds), Median(Ratios(speeds, triads)));
  };
  for (const auto& run : elements) {
    print(run->name(), ElementsRun::bytes(), run->speeds);
  }
  for (Training& training : trainings) {
    print(training.how().name, training.how().bytes(), training.speeds);
    TESSERA_RETURN_IF_ERROR(training.Close());
  }
  return absl::OkStatus();
}

}  // namespace
}  // namespace tessera

int main(int argc, char** argv) {
  absl::SetProgramUsageMessage("Measures updates of states on the host.");
  const absl::Status status = tessera::CatchTorch(
      "host_update", [&] { return tessera::Run(argc, argv); });
  return tessera::EndOf("host_update", status);
}
