// Tape: the operators that ran in a part of a forward, so that the same memory
// can be computed again, to the same bits, without the user's code.
//
//   Begin, End   an operator: its arguments, as places in memories of the tape
//                or as tensors from outside; which memories it made or wrote
//   Close        of all operators those that the wanted memories need stay
//   Replay       runs them; under no autograd, with the generators where they
//                were
//
// A memory is a storage that an operator on the tape made. View operators need
// not be on the tape: an argument is a place in a memory. The tape is below
// autocast: casts are on it as operators.
//
// What an operator on the tape writes outside of it (running statistics) is
// written to a copy in Replay. Memory that nobody on the tape has filled (an
// at::empty that a raw pointer wrote to) is kept as it was when an operator
// first read it. A tape that cannot be run again says so (spoilt): an operator
// on it writes a parameter, or does not say what it writes.
//
// Threads: Begin, End and Close on one, Replay on any, one at a time.
#ifndef SHARDING_RECOMPUTE_TAPE_H_
#define SHARDING_RECOMPUTE_TAPE_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "ATen/core/Tensor.h"
#include "ATen/core/dispatch/Dispatcher.h"
#include "absl/types/span.h"
#include "base/torch/placed_tensor.h"
#include "sharding/dispatch/operator_info.h"
#include "sharding/recompute/generator_state.h"
#include "sharding/recompute/outside_tensor.h"
#include "sharding/recompute/storage_map.h"

namespace tessera {

class Tape {
 public:
  // `name`: what is recomputed; for messages.
  explicit Tape(std::string name) : name_(std::move(name)) {}
  Tape(const Tape&) = delete;
  Tape& operator=(const Tape&) = delete;

  // ---- While it is recorded.

  // These are called as OperatorWatch's. False: the operator is not on the
  // tape. `outside` provides tensors from outside. `keep`: the operator's
  // results must not be recomputed, if possible.
  bool Begin(const c10::OperatorHandle& op, const OperatorInfo& info,
             const torch::jit::Stack& stack, OutsideTensors* outside);
  void End(const c10::OperatorHandle& op, const OperatorInfo& info,
           const torch::jit::Stack& stack, bool keep);
  // The operator has thrown.
  void Failed();
  // Why the tape cannot be run again; "": it can.
  const std::string& spoilt() const { return spoilt_; }
  // Marks that the tape cannot be run again, because of `why`.
  void Spoil(std::string why);
  // Returns the memory that a tensor lies in; -1: none of the tape.
  int MemoryOf(const at::Tensor& tensor) const;
  // Whether no operator on the tape has filled the memory.
  bool IsUnfilled(int memory) const {
    return memories_[static_cast<size_t>(memory)].unfilled;
  }
  // A hash of the operators, without sizes: equal tapes have equal ones.
  uint64_t signature() const { return signature_; }

  // ---- Afterwards.

  // Drops operators that the memories `wanted` do not need. Memories that are
  // held instead of recomputed count as outside tensors then. REQUIRES: not
  // spoilt.
  void Close(absl::Span<const int> wanted, OutsideTensors* outside);
  // Whether the memory is held since it was made: Replay returns it as it is.
  bool Holds(int memory) const {
    return memories_[static_cast<size_t>(memory)].held.defined();
  }
  // Sees each memory that one operator alone writes, as soon as it is made, and
  // may replace it for the operators that follow.
  using Made = std::function<void(int memory, c10::Storage* made)>;
  // Computes the wanted memories, in Close's order. Throws libtorch's error of
  // a changed version if something from outside has changed, and what the
  // operators throw. Parameters are gathered; COLLECTIVE where their gathers
  // are.
  std::vector<c10::Storage> Replay(const Made& made = nullptr) const;
  // Holds the memory of `alias`, as if its maker's results were kept. Close has
  // to follow, if need be again.
  void Hold(int memory, const at::Tensor& alias) {
    memories_[static_cast<size_t>(memory)].held = alias;
  }
  // Returns all memories that the memory's maker made.
  std::vector<int> MadeWith(int memory) const;
  // Moves what the tape holds for Replay to `group`. REQUIRES: Close.
  void MoveHeld(ActivationStore::Group* group);
  // Returns the i-th wanted memory, and the name of a memory's maker.
  int wanted(size_t i) const { return wanted_[i]; }
  const std::string& MakerOf(int memory) const {
    return memories_[static_cast<size_t>(memory)].maker;
  }
  // Forgets all.
  void Clear();
  bool empty() const { return operators_.empty(); }
  size_t size() const { return operators_.size(); }
  const std::string& name() const { return name_; }

 private:
  struct Memory {
    at::Tensor held;  // an alias; undefined: it is not to be held
    TensorPlace held_place;
    std::shared_ptr<OutsideTensor> outside;  // after Close, of `held`
    bool unfilled = false;  // nobody on the tape has written to it
    int writers = 0;
    std::string maker;  // operator
  };
  // A tensor argument; undefined if it has neither memory nor outside.
  struct Use {
    int memory = -1;
    std::shared_ptr<OutsideTensor> outside;
    const c10::StorageImpl* storage = nullptr;  // of `outside`, while it runs
    TensorPlace place;                          // not of what has no storage
    bool placed = false;
    bool written = false;
  };
  struct Result {
    size_t position;  // among the tensors returned
    int memory;
    TensorPlace place;
  };
  struct Operator {
    std::optional<c10::OperatorHandle> handle;  // none: see `fills`
    std::vector<c10::IValue> arguments;         // tensors left out
    std::vector<Use> uses;
    std::vector<Result> results;
    std::optional<GeneratorState> drawn_from;
    int generator = -1;  // the argument that may be one
    bool ReadsOutside(const at::Tensor& tensor) const;
    // No operator: memory uses[0].memory becomes a copy of uses[0].outside.
    bool fills = false;
  };

  void SpoilBy(const OperatorInfo& info, const std::string& why);
  bool MayRecord(const c10::OperatorHandle& op, const OperatorInfo& info,
                 const torch::jit::Stack& stack);
  Use UseOf(const at::Tensor& tensor, bool written, bool overwritten,
            OutsideTensors* outside);
  void Fill(int memory, const c10::Storage& storage);
  bool IsNeeded(const Operator& op, const std::vector<bool>& needed) const;
  void Run(const Operator& op, std::vector<c10::Storage>* storages) const;

  const std::string name_;
  std::string spoilt_;
  uint64_t signature_ = 0;
  std::vector<Memory> memories_;
  StorageMap<int> by_storage_;  // while the tape is recorded
  std::vector<Operator> operators_;
  // Between Begin and End.
  std::optional<Operator> running_;
  std::optional<GeneratorState> before_;
  // After Close: the wanted memories; and for each operator, the memories that
  // no later one needs.
  std::vector<int> wanted_;
  std::vector<std::vector<int>> last_used_;
};

}  // namespace tessera
#endif  // SHARDING_RECOMPUTE_TAPE_H_
