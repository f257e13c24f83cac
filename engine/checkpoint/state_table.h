// StateTable: lists a model's storages as a checkpoint names them, and the part
// of each that this rank holds. Only names, sizes and places count: units, gaps
// and shards are this run's own, and another run's may differ.
#ifndef ENGINE_CHECKPOINT_STATE_TABLE_H_
#define ENGINE_CHECKPOINT_STATE_TABLE_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/container/flat_hash_map.h"
#include "absl/strings/string_view.h"
#include "checkpoint/format/manifest.pb.h"
#include "offload/shard_states.h"
#include "optim/sharded_optimizer.h"
#include "sharding/flat/flat_parameter.h"

namespace torch::nn {
class Module;
}

namespace tessera {

class StateTable {
 public:
  // A sharded storage: a slot of a flat.
  struct Slot {
    int flat = 0;
    int slot = 0;
  };
  // A tensor that each rank has whole: a buffer, or a parameter that the engine
  // leaves alone.
  struct Plain {
    at::Tensor tensor;
    bool buffer = false;
  };
  // A state of a parameter that has a shape of its own, which each rank has
  // whole.
  struct Shaped {
    int flat = 0;
    size_t parameter = 0;  // of the flat
    std::string name;      // "row_var"
    std::vector<int64_t> sizes;
  };
  // The number of a state that a checkpoint holds of a flat's elements: kValue,
  // or from kFirst on the optimizer's.
  using State = int;
  static constexpr State kValue = 0, kFirst = 1;
  static constexpr int kMostStates = kFirst + kMaxCustomStates + 1;

  StateTable(const std::vector<std::shared_ptr<FlatParameter>>& flats,
             ShardedOptimizer* optimizer, const torch::nn::Module& module);

  // The number of states of a flat's elements, with an optimizer or without.
  int num_states(int flat) const;
  std::string NameOf(int flat, State state) const;
  // Whether it is the average of values (ema_decay).
  bool IsAverage(int flat, State state) const;
  // Whether a state may begin beside older moments, because an option was
  // turned on during a run: as zeros, as in a new optimizer, or for the average
  // as the values. exp_avg_sq, for example, may not: its zeros late in a run
  // make huge updates.
  bool MayBeginLate(int flat, State state) const;
  // Whether optimizers (ShardedOptimizer::name) differ by such options alone:
  // "adamw" and "adamw_amsgrad", "sgd" and "sgd_momentum"; of joined ones all.
  static bool AreRelated(absl::string_view a, absl::string_view b);
  // The slots in the order of the model's parameters. The manifest numbers them
  // in this order, then the plain tensors, then the shaped states that exist.
  const std::vector<Slot>& slots() const { return slots_; }
  const std::vector<Plain>& plain() const { return plain_; }
  // The shaped states in the order of the model's parameters, whether they
  // exist or not.
  const std::vector<Shaped>& shaped() const { return shaped_; }
  // Returns the state's tensor; undefined where the flat has no states.
  at::Tensor ValuesOf(const Shaped& shaped) const {
    return optimizer_->states()
        .factored(static_cast<size_t>(shaped.flat))
        .Find(shaped.parameter, shaped.name);
  }
  const at::Tensor& ParameterOf(const Shaped& shaped) const {
    return FlatOf(shaped.flat).parameters()[shaped.parameter].tensor;
  }

  // Returns all names of a parameter or buffer, in the module's order.
  const std::vector<std::string>& NamesOf(const at::Tensor& tensor) const;
  // Describes all storages in a manifest.
  void Describe(proto::CheckpointManifest* head) const;
  // Whether this rank has elements of a state, [owned]; and their dtype in a
  // checkpoint, whatever dtype they are kept in (StateNumbers).
  bool Has(int flat, State state) const;
  at::ScalarType DtypeOf(int flat, State state) const;
  // Whether an optimizer's state is never negative, as StepState says.
  bool non_negative(int flat, State state) const {
    return state != kValue &&
           optimizer_->states().IsNonNegative(
               static_cast<size_t>(flat), static_cast<size_t>(state - kFirst));
  }
  // Whether it is a value that is kept in two halves (ShardStates::splits):
  // Buffer has one of them, and Elements cannot be called.
  bool IsSplit(int flat, State state) const {
    return state == kValue && FlatOf(flat).states().splits();
  }
  // Returns where a state's elements lie, perhaps on a disk. REQUIRES: Has.
  TieredBuffer& Buffer(int flat, State state) const {
    ShardStates& states = FlatOf(flat).states();
    return state == kValue ? states.value()
                           : states.moments()[static_cast<size_t>(state) - 1];
  }
  // Returns the elements in `part` of [owned], as they are kept. REQUIRES: Has,
  // not IsSplit, and that they are in memory or raised.
  at::Tensor Elements(int flat, State state, Range part) const;
  // Returns the elements of a slot that are in `part`, a range of its flat.
  Range Part(const Slot& slot, Range part) const;
  // Returns the elements that a checkpoint has of a slot, all parts together.
  int64_t WholeNumel(const Slot& slot) const;
  // Returns of which parameter a slot has a part; absent: it has the whole.
  const std::optional<PartOfWhole>& PartOf(const Slot& slot) const {
    return FlatOf(slot.flat).ParameterOfSlot(slot.slot).part;
  }

 private:
  FlatParameter& FlatOf(int flat) const {
    return *flats_[static_cast<size_t>(flat)];
  }
  void AddShaped();
  void DescribeShaped(const Shaped& shaped,
                      proto::CheckpointManifest* head) const;
  void DescribeSlot(const Slot& slot, proto::CheckpointStorage* storage) const;

  const std::vector<std::shared_ptr<FlatParameter>>& flats_;
  ShardedOptimizer* const optimizer_;
  std::vector<Slot> slots_;
  std::vector<Plain> plain_;
  std::vector<Shaped> shaped_;
  absl::flat_hash_map<const at::TensorImpl*, std::vector<std::string>> names_;
};

// Return how a checkpoint has a parameter: a divided one whole, row-major.
std::vector<int64_t> SavedSizes(const FlatParameter::Parameter& p);
std::vector<int64_t> SavedStrides(const FlatParameter::Parameter& p);

// How many numbers an element of a tensor is stored as, and their dtype:
// complex numbers are pairs of real ones.
int64_t NumbersPer(const at::Tensor& tensor);
at::ScalarType NumberDtype(const at::Tensor& tensor);
// StateNumbers and SetStateNumbers convert optimizer states from what they are
// kept as to numbers, and back. States of 8 bits (optim/kernels/block8.h) are
// kept as bytes in blocks, and are float32 numbers; others are kept as numbers.
// They may be on any device; blocks there go through the CPU, blocking. Both
// throw c10::Error. LOCAL.
//
// Returns the first `numel` numbers of `kept`, which begins with a block; not a
// copy where they are kept as numbers.
at::Tensor StateNumbers(const at::Tensor& kept, int64_t numel,
                        bool non_negative);
// Sets `kept` to `numbers`, of any floating dtype. Elements behind them in the
// last block become 0.
void SetStateNumbers(const at::Tensor& numbers, bool non_negative,
                     const at::Tensor& kept);

// Returns the row-major strides of `sizes`, in elements.
std::vector<int64_t> ContiguousStrides(at::IntArrayRef sizes);
// Returns strides for comparison: those that may be anything, of dims of one
// element or of empty tensors, become 0.
std::vector<int64_t> PlainStrides(at::IntArrayRef sizes,
                                  at::IntArrayRef strides);

}  // namespace tessera
#endif  // ENGINE_CHECKPOINT_STATE_TABLE_H_
