// Tracer: runs a thread's operators without computing.
//
//   operator --> autograd (as always) --> fallback of the key Fake
//                                           |
//     a view                                the CPU kernel, on sizes alone
//     made of other operators               these come by themselves
//     all arguments known, results small    computed
//     a rule, or a kernel of meta           sizes, strides, dtype; fake results
//     else, arguments small                 computed on zeros, for the sizes
//     else                                  an error that names it
//
// Why tensors of the CPU, and not of the meta device: which kernels composite
// operators choose (attention, convolutions, recurrent layers), what casts and
// constructors do, depends on the device. Why a key below autograd: the graph,
// what it saves and when that is freed are then libtorch's own.
//
// Why small tensors are computed: tables, masks, numbers that constructors and
// forwards look at (item, accessors) are those of a real run. What is known is
// what all that it was made from is.
//
// Threads: a Scope is its thread's; backward of CPU tensors runs on the thread
// that calls it, with its keys.
#ifndef SHARDING_TRACE_TRACER_H_
#define SHARDING_TRACE_TRACER_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "ATen/core/Tensor.h"
#include "ATen/core/dispatch/Dispatcher.h"
#include "ATen/core/stack.h"
#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "base/above/below_autograd.h"
#include "c10/core/impl/LocalDispatchKeySet.h"
#include "sharding/dispatch/operator_watch.h"
#include "sharding/trace/meta_call.h"
#include "sharding/trace/trace_log.h"
#include "sharding/trace/traced_operator.h"
#include "sharding/trace/tracer_options.h"

namespace tessera {

class Tracer final : private BelowAutograd {
 public:
  // `log` null: nothing is recorded.
  Tracer(const TracerOptions& options, std::shared_ptr<TraceLog> log);
  ~Tracer() override;

  // Makes this thread's operators run here while it lives. Scopes do not nest.
  class Scope {
   public:
    explicit Scope(Tracer* tracer);
    ~Scope();
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    BelowAutograd::Scope below_;
    c10::impl::IncludeDispatchKeyGuard above_;
    c10::impl::ExcludeDispatchKeyGuard no_tag_;
    NoValues no_values_;
  };
  static Tracer* Current();

  // Makes the log record operators that use `t` as uses of `parameter`;
  // `module` is for messages. Call it before the scope.
  void AddParameter(const at::Tensor& t, int32_t parameter, std::string module);

  // For the fallbacks.
  bool IsParameter(const at::Tensor& t) const;
  bool casts_inputs() const { return options_.cast_inputs; }
  void Begin(const at::Tensor& parameter) const;
  // Returns "[module] OPERATOR" with the module in use, for messages.
  std::string Where(const std::string& op) const;

 private:
  void RunBelow(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                torch::jit::Stack* stack) override;
  const TracedOperator& InfoOf(const c10::OperatorHandle& op);

  void TellUses(const TracedOperator& info, const torch::jit::Stack& stack);
  void Dispatch(const c10::OperatorHandle& op, const TracedOperator& info,
                c10::DispatchKeySet keys, torch::jit::Stack* stack);

  void TellNode();
  void TellUse(const TracedOperator& info, bool written,
               c10::StorageImpl* storage);
  void TellCast(const torch::jit::Stack& stack);
  bool Known(const at::Tensor& t) const;
  bool AllKnown(const TracedOperator& info,
                const torch::jit::Stack& stack) const;
  void RunReally(const c10::OperatorHandle& op, const TracedOperator& info,
                 c10::DispatchKeySet keys, torch::jit::Stack* stack);
  void RunWithoutValues(const c10::OperatorHandle& op,
                        const TracedOperator& info, c10::DispatchKeySet keys,
                        torch::jit::Stack* stack);
  void RunOnZeros(const c10::OperatorHandle& op, const TracedOperator& info,
                  c10::DispatchKeySet keys, torch::jit::Stack* stack);
  void RunEqual(const c10::OperatorHandle& op, const TracedOperator& info,
                c10::DispatchKeySet keys, torch::jit::Stack* stack);
  // Puts results on meta on the stack, as tensors of the trace.
  void Return(const TracedOperator& info, const MetaCall& call,
              const std::vector<c10::IValue>& results,
              torch::jit::Stack* stack);
  void Record(const TracedOperator& info, const MetaCall& call,
              const std::vector<c10::IValue>& results);
  at::Tensor Adopt(const MetaCall& call, const at::Tensor& meta);
  void Resize(const at::Tensor& t, const at::Tensor& like);
  void SyncWritten(const TracedOperator& info, const MetaCall& call,
                   const torch::jit::Stack& stack);
  int64_t NewBytes(const MetaCall& call,
                   const std::vector<c10::IValue>& results) const;
  void Forget(const at::Tensor& written);
  [[noreturn]] void Fail(const TracedOperator& info,
                         const std::string& what) const;

  const TracerOptions options_;
  const std::shared_ptr<TraceLog> log_;
  absl::flat_hash_map<const c10::StorageImpl*, int32_t> parameters_;
  std::vector<std::string> modules_;  // by parameter
  // Storages from outside whose values would have changed.
  absl::flat_hash_set<const c10::StorageImpl*> changed_;
  // On which parameter's behalf a node of autograd was made, and after how many
  // events.
  struct Node {
    int32_t unit;
    int64_t forward;
  };
  absl::flat_hash_map<uint64_t, Node> nodes_;
  absl::flat_hash_map<const c10::FunctionSchema*,
                      std::unique_ptr<TracedOperator>>
      operators_;
  // Meta storages that became fake ones in the running operator.
  std::vector<std::pair<const c10::StorageImpl*, c10::Storage>> adopted_;
};

}  // namespace tessera
#endif  // SHARDING_TRACE_TRACER_H_
