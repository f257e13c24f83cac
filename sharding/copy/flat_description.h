// FlatDescription: what a flat parameter is from the start to the end: its
// parameters, where they lie in the flat buffer, what this rank owns of it, the
// dtypes and the groups of ranks.
//
//   flat     [ w1 ..| b1 .| w2 ....|....]   P elements
//                                           (base/layout/layout.h)
//   owned    flat[r*S, (r+1)*S)             what this rank's optimizer updates
//                                           (all of flat where states are
//                                           whole)
//
// W, r and "all ranks" are those of its communicator, the shard group: all
// ranks, or a part of them, of which there are replicas then
// (FlatParameterOptions::replicas).
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

// The three booleans that a ZeRO stage is.
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
  // Of sums over ranks; the working one if absent.
  std::optional<at::ScalarType> reduce_dtype;
  // The step's gradient has it, and micro-batches are added in it; that of
  // steps if absent, or if these are not in float32. DeepSpeed's
  // grad_accum_dtype.
  std::optional<at::ScalarType> gradient_dtype;
  // Masters have the working dtype where that has 16 bits, and are that copy
  // itself; else they are float32. DeepSpeed's bf16_master_weights_and_grads.
  bool narrow_masters = false;
  // Has a master and an optimizer state from the start.
  bool trainable = true;
  // What the optimizer changed reaches the other ranks while the program goes
  // on (stages 1 and 2); the first use waits.
  bool overlap = true;
  // Operators cast other tensors to the parameters' dtype
  // (sharding/dispatch/cast_inputs.h).
  bool cast_inputs = false;
  // Debugging: keeps a fingerprint of what was written (TakeWritten).
  bool check_writes = false;
  // The ranks that own the same part of the flat in other shard groups, in the
  // order of these: PyTorch's HSDP. Null: there is one shard group.
  std::shared_ptr<Communicator> replicas;
  // A group of n neighbouring ranks, n a divisor of the world size: a flat that
  // is freed after its forward leaves P / n elements with each of them, from
  // which its backward gathers. FSDP2's reshard_after_forward = n, DeepSpeed's
  // hpZ.
  std::shared_ptr<Communicator> reshard_group;
  // Memory for the working copy that all ranks see, each owner writing its part
  // of it, and where it begins there: the flat is never gathered and never
  // freed, whether the stage shards parameters or not. Null: memory of its own.
  std::shared_ptr<SharedMemory> shared;
  int64_t shared_offset = 0;  // bytes
  // Gathers are no collectives: each rank reads the others' shards; this flat's
  // are `served_key`. Null: they are. Not with reshard_group.
  std::shared_ptr<ServedGathers> served;
  int64_t served_key = 0;
  // What updates that part of the flat that is not in the memory of its device,
  // and whose disk it is; null: all of it is there. The host is for flats on a
  // device, a disk for flats whose parameters are sharded.
  std::shared_ptr<UpdateStream> stream;
  // Masters that are not the working copy, and the optimizer's states.
  Tier states = Tier::kMemory;
  // The shard of the step's gradient, where that is sharded; not of a device on
  // a disk.
  Tier gradients = Tier::kMemory;
  // Shards of the working copy, of flats whose parameters are sharded; without
  // `shared` and `served`. Where they are the masters, these.
  Tier parameters = Tier::kMemory;

  TieredBuffer::Place PlaceOf(Tier tier) const;
};

// Where the storages of these parameters lie in the flat buffer.
FlatLayout LayoutOf(const std::vector<NamedParameter>& parameters,
                    int world_size);
// What their operators compute with; of elements, never complex.
at::ScalarType WorkingDtypeOf(const std::vector<NamedParameter>& parameters,
                              const FlatParameterOptions& options);
// What masters of parameters of that dtype are kept in; of elements.
at::ScalarType MasterDtypeOf(at::ScalarType parameters,
                             const FlatParameterOptions& options);
// What masters of that dtype are stepped in.
at::ScalarType StepDtypeOf(at::ScalarType masters);
// Of the step's gradients beside masters of that dtype.
at::ScalarType GradientDtypeOf(at::ScalarType masters,
                               const FlatParameterOptions& options);

class FlatDescription {
 public:
  struct Parameter {
    at::Tensor tensor;  // the module's own
    std::string name;
    int index = 0;  // in the model, over all units
    int slot = 0;   // its storage in the flat
    Range range;    // its elements in the flat buffer, dense
    // Where its first element lies in its storage, in elements.
    int64_t storage_offset = 0;
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
  // By which uses of the parameters over a storage are told to
  // base/step_memory (NoteUnitUse): the number of their unit.
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
  // What a step computes in, and keeps its states in unless told otherwise:
  // that of masters, float32 of those of 16 bits.
  at::ScalarType step_dtype() const { return StepDtypeOf(master_dtype_); }
  at::ScalarType reduce_dtype() const { return reduce_dtype_; }
  at::ScalarType gradient_dtype() const { return gradient_dtype_; }
  at::Device device() const { return device_; }
  // The optimizer computes on the CPU, though the flat is on a device: its
  // states are not there.
  bool updated_on_host() const {
    return !device_.is_cpu() && options_.states != Tier::kMemory;
  }
  at::Device update_device() const {
    return updated_on_host() ? at::Device(at::kCPU) : device_;
  }
  // Masters have memory of their own: of another dtype, or off the device, on
  // which the working copy is.
  bool separate_masters() const {
    return master_dtype_ != dtype_ ||
           (updated_on_host() && options_.parameters == Tier::kMemory);
  }
  Communicator* communicator() const { return comm_.get(); }  // shard group
  Communicator* replicas() const { return options_.replicas.get(); }
  // First parameter over this storage.
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
  at::ScalarType reduce_dtype_ = at::kFloat;
  at::ScalarType gradient_dtype_ = at::kFloat;
  at::Device device_{at::kCPU};
  std::shared_ptr<Communicator> comm_;
};

}  // namespace tessera
#endif  // SHARDING_COPY_FLAT_DESCRIPTION_H_
