// StagedRun: runs an unmodified program on every rank of a pipeline, where each
// rank computes the operators of its own stage alone.
//
//   operator --> autograd (as always) --> RunBelow
//     all arguments are everywhere      computed here, and on every other rank
//     of this rank's stage              computed; what it needs of other stages
//                                       is received first
//     of another stage                  its results have sizes, and no values;
//                                       what it needs of this stage is sent
//
// The stage of an operator, which all ranks find alike: in forward the latest
// of those that have computed its arguments, where a parameter counts as its
// home; in backward that of the operator whose node runs. So values go to later
// stages in forward and gradients to earlier ones, also past stages between,
// and a parameter that is used by two stages (tied weights) is sent to the
// other, once a batch; its gradient comes back. No operator runs on other sizes
// or in another order than without a pipeline, so the bits are the same.
//
// Every rank builds the whole graph. So hooks, functions of the user's and
// saved tensors are libtorch's own, on tensors that may have no values.
//
// Random numbers: all ranks draw all of them, those of other stages' operators
// for nobody, so that their generators stay equal.
//
// Values that a program asks for (item(), nonzero) must be everywhere: an error
// names the operator, on all ranks. at::equal is true of one tensor alone, as
// attention asks it.
//
// Threads: one at a time; a Scope is its thread's, and so is backward (of
// tensors of the CPU).
//
// Sources: GPipe (Huang et al., 2019), PipeDream-Flush (Narayanan et al., 2021)
// for what is run when (schedule.h).
#ifndef PARALLEL_PIPELINE_STAGED_RUN_H_
#define PARALLEL_PIPELINE_STAGED_RUN_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "ATen/core/Tensor.h"
#include "ATen/core/dispatch/Dispatcher.h"
#include "ATen/core/stack.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/time/time.h"
#include "base/above/below_autograd.h"
#include "parallel/pipeline/stage_links.h"
#include "parallel/pipeline/staged_storages.h"
#include "sharding/trace/meta_call.h"
#include "sharding/trace/traced_operator.h"

namespace tessera {

struct StagedParameter {
  at::Tensor
      tensor;  // the module's own; without memory where it is not at home
  std::string name;
  int home = 0;  // the stage that trains it
};

class StagedRun final : private BelowAutograd {
 public:
  // `one_way`: ranks have several micro-batches under way in different orders,
  // so values may go to later stages alone in forward and to earlier ones in
  // backward; others, as of a gradient that a forward takes, are an error.
  // `casts_inputs`: operators cast their inputs to the dtype of parameters, as
  // an engine has it (sharding/dispatch/cast_inputs.h); so they do for
  // parameters of other stages. REQUIRES: at most kMaxStages.
  StagedRun(int stage, int stages, bool one_way, bool casts_inputs,
            const std::vector<StagedParameter>& parameters,
            std::shared_ptr<StageLinks> links);
  ~StagedRun() override;

  // While it lives this thread's operators run here, for a micro-batch.
  class Scope {
   public:
    // `doing` is for messages: "the forward of micro-batch 3".
    Scope(StagedRun* run, int micro_batch, bool backward, std::string doing);
    ~Scope();
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    StagedRun* const run_;
    BelowAutograd::Scope below_;
    std::optional<c10::impl::IncludeDispatchKeyGuard> above_;
    // Autocast casts parameters of other stages at each use, as an engine has
    // its own cast: all ranks run the same operators.
    const bool cached_casts_;
  };
  // Returns this thread's; null: it is in no scope.
  static StagedRun* Current();

  int stage() const { return stage_; }
  // Whether it is a parameter that another stage trains.
  bool IsElsewhere(const at::Tensor& tensor) const;
  // Returns `tensor` with values on all stages; of a parameter, a copy. Within
  // a scope. Errors are thrown.
  at::Tensor BringEverywhere(const at::Tensor& tensor);
  // Adds a number to print() that is the same on all ranks.
  void AddToPrint(uint64_t number);
  // Drops what is known of tensors that exist no more.
  void EndMicroBatch() { storages_.Sweep(); }
  // Ends a batch: drops the parameters that were sent here, and sends what
  // stages have written to older tensors (buffers) to all. Within a scope.
  // Errors are thrown.
  void EndBatch();

  // What forwards have run and all stages exchanged since the run was made, as
  // a number that is the same where programs are the same.
  uint64_t print() const { return print_; }
  // Bytes that this stage has sent, and the time that it has waited for values
  // of others, since the run was made.
  int64_t sent_bytes() const { return sent_bytes_; }
  absl::Duration waited() const { return waited_; }

 private:
  void RunBelow(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                torch::jit::Stack* stack) override;
  void AddHomeHook(const StagedParameter& parameter);
  struct KnownOperator {
    std::unique_ptr<TracedOperator> traced;
    uint64_t print = 0;  // of its name
  };
  const KnownOperator& InfoOf(const c10::OperatorHandle& op);
  // Everywhere: nullopt.
  std::optional<int> StageOf(const TracedOperator& info,
                             const torch::jit::Stack& stack) const;
  std::optional<int> StageOfNode() const;
  std::optional<int> CommonStage(const TracedOperator& info,
                                 const torch::jit::Stack& stack) const;
  void NoteNode(int stage);
  void CheckCanBeElsewhere(const TracedOperator& info) const;
  void CheckHere(const at::Tensor& tensor, const std::string& what) const;
  void NoteInputs(const TracedOperator& info, const torch::jit::Stack& stack);
  void CheckNoParameterWritten(const TracedOperator& info,
                               const torch::jit::Stack& stack) const;
  void CheckValuesEverywhere(const TracedOperator& info,
                             const torch::jit::Stack& stack) const;
  void RunAt(int stage, const c10::OperatorHandle& op,
             const TracedOperator& info, c10::DispatchKeySet keys,
             torch::jit::Stack* stack);
  static void RunHere(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                      torch::jit::Stack* stack);
  // staged_results.cc
  void RunElsewhere(const c10::OperatorHandle& op, const TracedOperator& info,
                    c10::DispatchKeySet keys, torch::jit::Stack* stack);
  void Return(const TracedOperator& info, const MetaCall& call,
              const std::vector<c10::IValue>& results,
              torch::jit::Stack* stack);
  at::Tensor Adopt(const MetaCall& call, const at::Tensor& meta);
  void LoseValues(const TracedOperator& info, const MetaCall& call,
                  const torch::jit::Stack& stack);
  // staged_transfers.cc
  void Bring(const at::Tensor& tensor, int to, const std::string& what);
  void CheckDirection(int from, int to, const std::string& what) const;
  void BringStorage(const c10::Storage& storage, int to, uint64_t description,
                    const std::string& what);
  at::Tensor Packed(const c10::Storage& storage, uint64_t description) const;
  void Unpack(const at::Tensor& message, const c10::Storage& storage,
              uint64_t description, int from, const std::string& what) const;

  const int stage_;
  const int stages_;
  const bool one_way_;
  const bool casts_inputs_;
  const std::shared_ptr<StageLinks> links_;
  StagedStorages storages_;
  std::vector<at::Tensor> parameters_;
  std::vector<unsigned> hooks_;  // by parameter: brings its gradient home
  bool active_ = false;          // within a Scope
  bool backward_ = false;
  std::string doing_;
  int64_t next_key_ = 0;
  int64_t next_order_ = 0;
  uint64_t print_ = 0;
  // Operators of the forward that runs, and the values from outside that they
  // were given.
  uint64_t program_ = 0;
  int64_t sent_bytes_ = 0;
  absl::Duration waited_;
  // By number of a node of autograd: the stage of its operator; -1: it
  // has none.
  absl::flat_hash_map<uint64_t, int> nodes_;
  absl::flat_hash_map<const c10::FunctionSchema*, KnownOperator> operators_;
  // Meta storages that became absent ones in the running operator.
  std::vector<std::pair<const c10::StorageImpl*, c10::Storage>> adopted_;
};

}  // namespace tessera
#endif  // PARALLEL_PIPELINE_STAGED_RUN_H_
