// PlacementWalk: divides parameters by the operators that get them, in the
// order of execution, as Megatron-LM divides a transformer by hand:
//
//   a product whose input is whole             column-parallel: its outputs
//   a product whose input is divided along     row-parallel: its inputs; the
//   what is summed over                        addends are summed over ranks
//   a table that is looked up in               its rows
//   a vector that meets parts elementwise      as these are (biases)
//
// A parameter is divided as its first use says, and is an ordinary one until
// then: the walk hands its part to the operator in its place.
//
// A column-parallel product is wrong where the next operators have no rule for
// its parts, as for a fused [q|k|v] whose slices are no heads. The first such
// operator is told by what it got; the caller walks again without that product.
//
// Threads: a walk is one thread's.
#ifndef PARALLEL_PLAN_PLACEMENT_WALK_H_
#define PARALLEL_PLAN_PLACEMENT_WALK_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "ATen/core/Tensor.h"
#include "ATen/core/dispatch/Dispatcher.h"
#include "ATen/core/stack.h"
#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/types/span.h"
#include "c10/core/Storage.h"
#include "parallel/tensor/part_group.h"
#include "parallel/tensor/placed.h"

namespace tessera {

class PlacementWalk {
 public:
  struct Decision {
    size_t parameter = 0;  // the caller's number
    TensorPlacement placement;
    bool row = false;  // of a row-parallel product
  };

  explicit PlacementWalk(std::shared_ptr<PartGroup> group)
      : group_(std::move(group)) {}

  // Has the walk know a parameter, which must keep its storage, and divide it
  // if `by_use`.
  void Add(size_t parameter, const at::Tensor& tensor, bool by_use);

  // Scope: the thread's operators are walked along while it lives.
  class Scope {
   public:
    explicit Scope(PlacementWalk* walk);
    ~Scope();
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;
  };

  // Has parameters that were not divided so far stay whole, since backward is
  // no first use.
  void EndForward();

  // In the order of first use.
  const std::vector<Decision>& decisions() const { return decisions_; }
  // Tells that the operator that runs gathers parts (PartGroup::OnGathered).
  void Gathers();
  // Whether parts of a parameter itself were gathered: its division saves no
  // work, and takes an exchange for each use.
  bool gathers_parameters() const { return gathers_parameters_; }
  // Returns which decision gave the first parts that were gathered.
  std::optional<size_t> gathered() const { return gathered_; }

  // For the fallback: returns false if the call is not the walk's concern.
  bool Run(const c10::OperatorHandle& op, torch::jit::Stack* stack);

 private:
  enum class Kind { kOther, kProduct, kLookup, kElementwise };
  // Which arguments are factors; -1: it has no bias.
  struct Use {
    Kind kind = Kind::kOther;
    size_t a = 0, b = 1;
    int bias = -1;
    bool transposed = false;  // b is [outputs, inputs]
  };
  static constexpr int64_t kUndecided = -2, kWhole = -1;
  struct Entry {
    size_t parameter = 0;
    at::Tensor tensor;
    int64_t dim = kUndecided;
    int64_t groups = 1;
    size_t decision = 0;
  };
  // The dimensions of a factor, and what it is multiplied with.
  struct Factor {
    int64_t inputs = 0, outputs = 0;
    at::Tensor other;
    int64_t others_inputs = 0;
  };
  using Arguments = absl::Span<c10::IValue>;

  const Use& UseOf(const c10::OperatorHandle& op);
  // Returns the entry that an argument is, or is a view of; null: none, or it
  // is placed.
  Entry* Find(const c10::IValue& argument);
  void Decide(Entry& entry, const TensorPlacement& placement, bool row);
  // Puts the part in place of the argument. Returns false if it stays.
  bool PlaceArgument(const Entry& entry, c10::IValue& argument);
  bool PlaceFactor(Entry& entry, c10::IValue& argument, const Factor& factor);
  bool PlaceProduct(const Use& use, Arguments arguments);
  bool PlaceTable(Arguments arguments);
  bool PlaceVectors(Arguments arguments, bool in_place);
  bool PlaceVector(c10::IValue& argument, int64_t size, int64_t groups);
  void NoteGiven(Arguments arguments);

  const std::shared_ptr<PartGroup> group_;
  absl::flat_hash_map<const c10::StorageImpl*, Entry> entries_;
  absl::flat_hash_set<const c10::StorageImpl*> parameters_;
  absl::flat_hash_map<const c10::FunctionSchema*, Use> uses_;
  std::vector<Decision> decisions_;
  // By the memory of a product's result, which is held so that no other tensor
  // is there: the decision that divided it.
  absl::flat_hash_map<const c10::StorageImpl*, std::pair<c10::Storage, size_t>>
      made_by_;
  std::optional<size_t> last_column_;
  // Which decision made the first divided tensor that the last operator with
  // one was given, and whether that is a parameter.
  std::optional<size_t> given_;
  bool given_parameter_ = false;
  bool gathers_parameters_ = false;
  std::optional<size_t> gathered_;
};

}  // namespace tessera
#endif  // PARALLEL_PLAN_PLACEMENT_WALK_H_
