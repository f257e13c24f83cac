// FlatDescription: the constant properties of a flat parameter: its parameters,
// where they lie in the flat buffer, the part that this rank owns, the dtypes
// and the groups of ranks.
//
//   flat     [ w1 ..| b1 .| w2 ....|....]   P elements
//                                           (base/layout/layout.h)
//   owned    flat[r*S, (r+1)*S)             what this rank's optimizer updates
//                                           (all of flat where states are
//                                           whole)
//
// W, r and "all ranks" refer to its communicator, the shard group: all ranks,
// or a part of them; then there are replicas (FlatParameterOptions::replicas).
//
// Threads: nothing changes after construction.
#ifndef SHARDING_COPY_FLAT_DESCRIPTION_H_
#define SHARDING_COPY_FLAT_DESCRIPTION_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "ATen/core/Tensor.h"
#include "base/layout/layout.h"
#include "comm/communicator.h"
#include "offload/tiered_buffer.h"
#include "sharding/copy/served_gathers.h"
#include "sharding/partition/named_parameter.h"

namespace tessera {

class UpdateStream;  // offload/update_stream.h

// A ZeRO stage, as three booleans.
struct Stage {
  bool sharded_optimizer = false;
  bool sharded_gradients = false;
  bool sharded_parameters = false;
  static Stage Of(int stage) { return {stage >= 1, stage >= 2, stage >= 3}; }
};

struct FlatParameterOptions {
  Stage stage;
  // Working dtype; the parameters' own if absent. Not for complex ones.
  std::optional<at::ScalarType> dtype;
  // Dtype of sums over ranks; the working dtype if absent.
  std::optional<at::ScalarType> reduce_dtype;
  // Dtype of the step's gradient, in which micro-batches are added; the step
  // dtype if absent, or if that is not float32. DeepSpeed's grad_accum_dtype.
  std::optional<at::ScalarType> gradient_dtype;
  // The step's gradient keeps the sums' dtype, if that has 16 bits, until more
  // is added to it or it is changed: its values are the same. REQUIRES: the
  // sums are the mean, which is so for one rank. Not with a disk.
  bool narrow_gradients = false;
  // Masters are the working copy itself where its dtype has 16 bits; otherwise
  // they are float32. DeepSpeed's bf16_master_weights_and_grads.
  bool narrow_masters = false;
  // Masters of float32 beside a working copy of bfloat16 are kept as 16-bit
  // remainders of it (offload/remainders.h). REQUIRES: states_tier and
  // parameters_tier are kMemory.
  bool remainder_masters = false;
  // The flat has a master and an optimizer state from the start.
  bool trainable = true;
  // New values of a copy that is always whole come from the other ranks, and
  // from an update on the host, while the program goes on; the first use waits.
  bool overlap = true;
  // Operators cast other tensors to the parameters' dtype
  // (sharding/dispatch/cast_inputs.h).
  bool cast_inputs = false;
  // For debugging: keeps a fingerprint of what was written
  // (UserWrites::TakeFingerprint).
  bool check_writes = false;
  // A rank that is alone gathers its parameters all the same, with what that
  // takes: for measurements and tests.
  bool shard_alone = false;
  // The ranks that own the same part of the flat in all shard groups, in the
  // groups' order: PyTorch's HSDP. Null: there is one shard group.
  std::shared_ptr<Communicator> replicas;
  // The number of stages of the pipeline of which this flat's ranks are one;
  // they are outermost among a job's ranks.
  int stages = 1;
  // A group of n consecutive ranks, n a divisor of the world size: a flat that
  // is freed after its forward leaves P / n elements on each of them, from
  // which its backward gathers. FSDP2's reshard_after_forward = n, DeepSpeed's
  // hpZ.
  std::shared_ptr<Communicator> reshard_group;
  // Shared memory for the working copy, which all ranks read and each owner
  // writes its part of; the flat begins at shared_offset. It is never gathered
  // and never freed, whether the stage shards parameters or not. Null: memory
  // of its own.
  std::shared_ptr<SharedMemory> shared;
  int64_t shared_offset = 0;  // bytes
  // Gathers are one-sided: each rank reads the others' shards, this flat's
  // under `served_key`. Null: gathers are collectives. Not with reshard_group.
  std::shared_ptr<ServedGathers> served;
  int64_t served_key = 0;
  // The stream that updates the offloaded parts of the flat, and whose disk
  // they lie on; null: nothing is offloaded. The host is for flats on a device,
  // a disk for flats whose parameters are sharded.
  std::shared_ptr<UpdateStream> stream;
  // Tier of masters that are not the working copy, and of optimizer states.
  Tier states_tier = Tier::kMemory;
  // Tier of the shard of the step's gradient, where that is sharded; not a disk
  // for a device.
  Tier gradients_tier = Tier::kMemory;
  // Tier of the working copy's shards, where parameters are sharded, without
  // `shared` and `served`. Where the shards are the masters, it is also the
  // masters' tier.
  Tier parameters_tier = Tier::kMemory;

  TieredBuffer::Place PlaceOf(Tier tier) const;
};

// Returns where the storages of these parameters lie in the flat buffer.
FlatLayout LayoutOf(const std::vector<NamedParameter>& parameters,
                    int world_size);
// Returns the dtype that operators compute with; of elements, so never complex.
at::ScalarType WorkingDtypeOf(const std::vector<NamedParameter>& parameters,
                              const FlatParameterOptions& options);
// Returns the dtype of masters of parameters of that dtype; of elements.
at::ScalarType MasterDtypeOf(at::ScalarType parameters,
                             const FlatParameterOptions& options);
// Whether masters of parameters of that dtype are kept as remainders.
bool SplitsMasters(at::ScalarType parameters,
                   const FlatParameterOptions& options);
// Returns the dtype of what is kept of masters with memory of their own.
at::ScalarType KeptMasterDtypeOf(at::ScalarType parameters,
                                 const FlatParameterOptions& options);
// Returns the dtype in which masters of that dtype are stepped.
at::ScalarType StepDtypeOf(at::ScalarType masters);
// Returns the dtype of the step's gradients beside masters of that dtype.
at::ScalarType GradientDtypeOf(at::ScalarType masters,
                               const FlatParameterOptions& options);
// Returns the dtype in which a step's gradient is kept that was reduced once,
// to `sums`.
at::ScalarType KeptGradientDtypeOf(at::ScalarType masters, at::ScalarType sums,
                                   const FlatParameterOptions& options);

class FlatDescription {
 public:
  struct Parameter {
    at::Tensor tensor;  // NamedParameter::tensor
    std::string name;
    int index = 0;  // in the model, over all units
    int slot = 0;   // its storage in the flat
    Range range;    // its elements in the flat buffer, dense
    // Where its first element lies in its storage, in elements.
    int64_t storage_offset = 0;
    // As NamedParameter's.
    std::optional<PartOfWhole> part;
    bool counted_elsewhere = false;

    // The module's own tensor, also where another stage has its values.
    const at::Tensor& of_module() const {
      return part.has_value() && part->of_pipeline() ? part->whole : tensor;
    }
  };
  // The part of a parameter that this rank owns; never empty.
  struct Segment {
    int parameter = 0;  // in parameters()
    Range range;        // in the flat buffer
  };

  // REQUIRES: `params` is not empty, of one dtype and device, dense and not
  // overlapping (sharding/partition/partition.h sees to that).
  FlatDescription(std::string name, std::vector<NamedParameter> params,
                  const FlatParameterOptions& options,
                  std::shared_ptr<Communicator> comm);
  FlatDescription(const FlatDescription&) = delete;
  FlatDescription& operator=(const FlatDescription&) = delete;

  const std::string& name() const { return name_; }
  // The number of the unit of the parameters over a storage, for
  // base/step_memory (NoteUnitUse).
  int memory_unit(int slot) const {
    return memory_units_[static_cast<size_t>(slot)];
  }
  const FlatParameterOptions& options() const { return options_; }
  const std::vector<Parameter>& parameters() const { return params_; }
  const std::vector<Segment>& segments() const { return segments_; }
  const FlatLayout& layout() const { return layout_; }
  Range owned() const { return owned_; }
  Stage stage() const { return options_.stage; }
  bool trainable() const { return options_.trainable; }
  bool cast_inputs() const { return options_.cast_inputs; }
  at::ScalarType dtype() const { return dtype_; }  // of elements: never complex
  at::ScalarType master_dtype() const { return master_dtype_; }
  // Masters, if they have memory of their own, are kept in this dtype: that of
  // remainders where they are split, else their own.
  at::ScalarType kept_master_dtype() const { return kept_master_dtype_; }
  bool splits_masters() const { return kept_master_dtype_ != master_dtype_; }
  // The dtype that a step computes in, and by default keeps its states in: the
  // masters', or float32 for masters of 16 bits.
  at::ScalarType step_dtype() const { return StepDtypeOf(master_dtype_); }
  at::ScalarType reduce_dtype() const { return reduce_dtype_; }
  at::ScalarType gradient_dtype() const { return gradient_dtype_; }
  // The dtype of a step's gradient that was reduced once: gradient_dtype(), or
  // a narrower one that has its values (FlatParameterOptions).
  at::ScalarType kept_gradient_dtype() const { return kept_gradient_dtype_; }
  at::Device device() const { return device_; }
  // Whether the optimizer runs on the CPU although the flat is on a device,
  // since its states are not there.
  bool updated_on_host() const {
    return !device_.is_cpu() && options_.states_tier != Tier::kMemory;
  }
  at::Device update_device() const {
    return updated_on_host() ? at::Device(at::kCPU) : device_;
  }
  // Whether masters have memory of their own: they have another dtype, or are
  // off the device that the working copy is on.
  bool separate_masters() const {
    return master_dtype_ != dtype_ ||
           (updated_on_host() && options_.parameters_tier == Tier::kMemory);
  }
  Communicator* communicator() const { return comm_.get(); }  // shard group
  Communicator* replicas() const { return options_.replicas.get(); }
  // Returns the first parameter over this storage.
  const Parameter& ParameterOfSlot(int slot) const {
    return params_[first_of_slot_[static_cast<size_t>(slot)]];
  }

 protected:
  ~FlatDescription() = default;

 private:
  const FlatParameterOptions options_;
  std::string name_;
  std::vector<int> memory_units_;  // by slot
  std::vector<Parameter> params_;
  std::vector<size_t> first_of_slot_;  // in params_
  std::vector<Segment> segments_;
  FlatLayout layout_;
  Range owned_;
  at::ScalarType dtype_ = at::kFloat;
  at::ScalarType master_dtype_ = at::kFloat;
  at::ScalarType kept_master_dtype_ = at::kFloat;
  at::ScalarType reduce_dtype_ = at::kFloat;
  at::ScalarType gradient_dtype_ = at::kFloat;
  at::ScalarType kept_gradient_dtype_ = at::kFloat;
  at::Device device_{at::kCPU};
  std::shared_ptr<Communicator> comm_;
};

}  // namespace tessera
#endif  // SHARDING_COPY_FLAT_DESCRIPTION_H_
