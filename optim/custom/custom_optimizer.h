// CustomOptimizer: a program's own optimizer, which is called with the elements
// in this rank's shards.
//
//   tessera::CustomOptimizer sign;
//   sign.name = "signum";
//   sign.states = {"momentum"};
//   sign.step = [](const tessera::CustomStep& s) {
//     s.states[0].lerp_(s.gradient, 1 - s.options.momentum);
//     s.master.add_(s.states[0].sign(), -s.options.lr);
//     return absl::OkStatus();
//   };
//   options.optimizer = sign;  // EngineOptions
//
// and in the configuration "optimizer": {"type": "Custom", "params": {...}}.
//
// The new value of an element may depend only on that element of master,
// gradient and states, and on constants: a shard holds any part of a parameter.
// Then the result depends neither on the number of ranks nor on the stage.
// (With a norm or a mean over a parameter it would, and this is not detected.)
// Parts begin and end at multiples of 64 elements of the parameter, or at its
// ends, so that operators that take several at once group them as in the whole.
#ifndef OPTIM_CUSTOM_CUSTOM_OPTIMIZER_H_
#define OPTIM_CUSTOM_CUSTOM_OPTIMIZER_H_

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "optim/algorithms/optimizer_options.h"

namespace tessera {

// One step of a part of a parameter.
struct CustomStep {
  absl::string_view parameter;  // its first name
  at::IntArrayRef sizes;        // of all of it
  // The range of its elements, in the order of its memory; a complex element
  // counts as two.
  int64_t begin = 0, end = 0;
  int group = 0;     // its number in Engine::GroupNames()
  int64_t step = 1;  // of this parameter, from 1; skipped ones do not count
  // The group's options, as configured, set and scheduled: lr, weight_decay,
  // beta1, ...
  const OptimizerOptions& options;
  // [end - begin] each: views of what is kept, to be changed in place; float32,
  // or float64 for float64 parameters. (For a parameter that lies unaligned in
  // a shared storage they are copies, in which elements that others own are 0.)
  at::Tensor master;
  at::Tensor gradient;  // unscaled and clipped; may hold another afterwards
  std::vector<at::Tensor> states;
};

struct CustomOptimizer {
  // The name in checkpoints, together with the names of the states: a
  // checkpoint with others is refused.
  std::string name;
  // Names of the states. Each state has the masters' sizes and dtype, and is
  // zero before a parameter's first step; states are sharded, offloaded, saved,
  // and loaded by any number of ranks. At most 8; not "value" or "ema", which
  // are the engine's.
  std::vector<std::string> states;
  // Called in each step that is not skipped, for each part of a parameter that
  // has a gradient, one after the other: once for the rank's part, or for
  // slices of it where states are on nvme. Runs without autograd, on the
  // current stream of the masters' device; for offloaded states on a thread of
  // the engine, perhaps after Step has returned. An error or exception is
  // returned by the step of its rank (for offloaded states by the call that
  // next needs them), and by the next collective call of the other ranks; the
  // engine is lost, since some parts have been stepped. LOCAL: it must not call
  // the engine.
  std::function<absl::Status(const CustomStep& step)> step;
  // It reads only the rate of the options: setting others is an error.
  bool reads_rate_alone = false;
  // It keeps states of its own: SaveCheckpoint is FailedPrecondition.
  bool keeps_states = false;
};

// Returns InvalidArgument for an invalid name or states, or a missing function.
absl::Status CheckCustomOptimizer(const CustomOptimizer& optimizer);

// Returns its name in checkpoints and messages: "signum(momentum)".
std::string DescribeCustom(const CustomOptimizer& optimizer);

// Calls its step. Errors name optimizer and parameter; exceptions become
// errors.
absl::Status CallCustom(const CustomOptimizer& optimizer,
                        const CustomStep& step);

// Returns the states of any optimizer, also a program's own, in their order,
// without the average.
std::vector<std::string> StateNamesOf(const OptimizerOptions& options);
// Returns the optimizer's name in checkpoints: "adamw", or DescribeCustom.
std::string OptimizerNameOf(const OptimizerOptions& options);

}  // namespace tessera
#endif  // OPTIM_CUSTOM_CUSTOM_OPTIMIZER_H_
