// CustomOptimizer: a program's own optimizer, which is called with what lies in
// this rank's shards.
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
// What becomes of an element may depend on nothing but that element of master,
// gradient and states, and on numbers: a shard holds any part of a parameter.
// Then the result depends neither on the number of ranks nor on the stage. (Of
// a norm or a mean over a parameter it would: nobody notices.) Parts begin and
// end at multiples of 64 elements of the parameter, or at its ends, so that
// operators that take several at once group them as in the whole.
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
  // Which of its elements these are, in the order of its memory; of a complex
  // one its real numbers are counted.
  int64_t begin = 0, end = 0;
  int group = 0;     // its number in Engine::GroupNames()
  int64_t step = 1;  // of this parameter, from 1; skipped ones do not count
  // The group's, as configured, set and scheduled: lr, weight_decay, beta1, ...
  const OptimizerOptions& options;
  // [end - begin] each, views of what is kept: changed in place. float32, of
  // float64 parameters that. (Of a parameter that lies unaligned in a storage
  // it shares: copies, in which what others own is 0.)
  at::Tensor master;
  at::Tensor gradient;  // unscaled and clipped; may hold another afterwards
  std::vector<at::Tensor> states;
};

struct CustomOptimizer {
  // In checkpoints, with the names of the states: one that has others is
  // refused.
  std::string name;
  // Each of the masters' sizes and dtype, zeros before a parameter's first
  // step; sharded, offloaded, saved, and loaded by any number of ranks. At most
  // 8; not "value" and not "ema", which are the engine's.
  std::vector<std::string> states;
  // Called in each step that is not skipped for each part of a parameter that
  // has a gradient, one after the other: once for what a rank has of it, of
  // states on nvme for slices of that. Without autograd, on the current stream
  // of the masters' device; of states that are offloaded on a thread of the
  // engine, and perhaps after Step has returned. An error or exception ends the
  // step of its rank (of offloaded states the call that next needs them), and
  // what the other ranks do next together, with it; the engine is lost, since
  // some parts have been stepped. LOCAL: it must not call the engine.
  std::function<absl::Status(const CustomStep& step)> step;
  // Of the options it reads the rate alone: others are errors, where they are
  // set.
  bool reads_rate_alone = false;
  // It keeps states of its own: SaveCheckpoint is FailedPrecondition.
  bool keeps_states = false;
};

// InvalidArgument of a name, states or a function that are none.
absl::Status CheckCustomOptimizer(const CustomOptimizer& optimizer);

// As checkpoints and messages call it: "signum(momentum)".
std::string DescribeCustom(const CustomOptimizer& optimizer);

// Calls it. Errors name optimizer and parameter; exceptions are errors, too.
absl::Status CallCustom(const CustomOptimizer& optimizer,
                        const CustomStep& step);

// Of any optimizer, a program's own, too: its states in their order, without
// the average.
std::vector<std::string> StateNamesOf(const OptimizerOptions& options);
// As checkpoints call it: "adamw", or DescribeCustom.
std::string OptimizerNameOf(const OptimizerOptions& options);

}  // namespace tessera
#endif  // OPTIM_CUSTOM_CUSTOM_OPTIMIZER_H_
