// A trace: one forward and backward of a module, without computing and without
// memory: which tensors are allocated and freed, when, and on whose behalf.
//
//   ConstructFake([] { return Gpt(options); })    parameters have sizes alone
//                                                 (construct_fake.h)
//   TakeTrace(*model, [&] { return model->loss(tokens, targets); })
//     --> Trace: allocations, frees, operators, uses of parameters, gradients
//
// The user's code runs as it is, on tensors of the CPU (sharding/trace/tracer.h
// says how), so a trace describes what libtorch's CPU kernels would do. It
// knows nothing of engines: what they hold besides is added elsewhere.
#ifndef SHARDING_TRACE_TRACE_H_
#define SHARDING_TRACE_TRACE_H_

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "sharding/trace/trace_log.h"
#include "sharding/trace/tracer_options.h"

namespace torch::nn {
class Module;
}

namespace tessera {

struct TracedParameter {
  std::string name;
  const c10::TensorImpl* tensor = nullptr;  // which it is
  int64_t bytes = 0;
  bool trained = true;
};

// Peak bytes of tensors, without parameters and what was there before.
struct TracePeak {
  int64_t bytes = 0;
  size_t event = 0;  // of the trace; while it is, this much is held
};

struct TraceOptions {
  TracerOptions tracer;
  // The dtype of parameters while the trace is taken; their own if null.
  std::function<at::ScalarType(const at::Tensor& parameter)> dtype;
};

struct Trace {
  std::vector<TracedParameter> parameters;  // as named_parameters()
  std::vector<std::string> operators;       // names, by number
  std::vector<TraceEvent> events;
  std::vector<TracedAllocation> allocations;  // by number
  std::vector<TracedUse> uses;                // in order
  size_t backward = 0;                        // the first event of the backward
  int64_t saved_bytes = 0;  // held between forward and backward

  // Returns the most that plain libtorch would hold, gradients included.
  TracePeak Peak() const;
  int64_t flops() const;
};

// Takes a trace. `loss`: the forward, to a scalar that backward() starts from;
// it makes its inputs itself, as in training (torch::zeros, torch::randint), or
// has real ones. The module may be real, of ConstructFake, or of
// ConstructSharded; it is left as it was: values, gradients, the state of the
// default generator. REQUIRES: no engine has its parameters. LOCAL.
//
// FailedPrecondition names the operator and the module that cannot be traced;
// otherwise errors are those of the user's code.
absl::StatusOr<Trace> TakeTrace(const torch::nn::Module& module,
                                const std::function<at::Tensor()>& loss,
                                const TraceOptions& options = {});

}  // namespace tessera
#endif  // SHARDING_TRACE_TRACE_H_
