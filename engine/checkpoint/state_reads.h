// StateReads: what a load reads of a checkpoint, and how it comes to its place.
//
//   lies                at first, all together       then
//   in memory           read to memory of its own    Place: copied
//   in memory, zeros    read to its place            -
//   on a disk, or is    verified, and not kept       ReadAgain: read again, to
//   of 8 bits                                        its place, flat by flat
//
// Until Place nothing has changed that Undo does not restore. Why some of it is
// read twice stands in state_reads.cc.
//
// Threads: outside order.
#ifndef ENGINE_CHECKPOINT_STATE_READS_H_
#define ENGINE_CHECKPOINT_STATE_READS_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/status/status.h"
#include "absl/types/span.h"
#include "checkpoint/checkpoint.h"
#include "checkpoint/copy_memory.h"
#include "engine/checkpoint/state_match.h"
#include "engine/checkpoint/state_table.h"
#include "optim/sharded_optimizer.h"
#include "sharding/flat/flat_parameter.h"

namespace tessera {

// Memory for numbers of the checkpoint that are copied to their places later.
class Staging {
 public:
  // Returns which of them these are.
  size_t Add(const WantedElements& wanted, at::ScalarType dtype);
  // Memory for all of them. ResourceExhausted.
  absl::Status Allocate();
  const std::vector<WantedElements>& wanted() const { return wanted_; }
  // [n]. REQUIRES: Allocate.
  at::Tensor Numbers(size_t i) const;

 private:
  std::vector<WantedElements> wanted_;
  std::vector<at::ScalarType> dtypes_;
  std::vector<int64_t> begins_;  // bytes
  int64_t bytes_ = 0;
  CopyMemory memory_;
};

class StateReads {
 public:
  // All outlive this; `optimizer` may be null.
  StateReads(const std::vector<std::shared_ptr<FlatParameter>>& flats,
             ShardedOptimizer* optimizer, const StateTable& table,
             const proto::CheckpointManifest& manifest)
      : flats_(flats),
        optimizer_(optimizer),
        table_(table),
        manifest_(manifest) {}

  // Tensors that each rank has whole are written in place, which those that
  // `match` finds must allow. LOCAL. FailedPrecondition.
  absl::Status CheckWritable(const StateMatch& match) const;
  // All that this rank has of what `match` finds; of flats the values alone
  // unless `with_states`, and then `shaped` (StateTable::FindShaped), too.
  // Takes the memory that it is read to. LOCAL. ResourceExhausted.
  absl::Status Plan(const StateMatch& match, bool with_states,
                    const std::vector<int>& shaped);
  // For ReadCheckpoint.
  std::vector<WantedElements> Wanted() const;
  // Where that fails, or what comes before Place. LOCAL.
  void Undo();
  // Of plain tensors that `values` has as this rank's own: these, in place of
  // rank 0's. LOCAL. DataLoss.
  absl::Status TakeOwn(const std::map<std::string, std::string>& values);

  // What has been read goes to its place, and its memory is given back. LOCAL.
  absl::Status Place();
  // The rest. LOCAL, blocking. The disks' errors; some of it has changed then.
  absl::Status ReadAgain(CheckpointReader* reader);

 private:
  // Elements of a state of a flat, [begin, end) of those that this rank owns.
  struct Owned {
    int flat = 0;
    StateTable::State kind = StateTable::kValue;
    Range range;
    // Where the checkpoint has them, as what; nullopt: it has none, since they
    // were never stepped there while others of the flat were, or the run that
    // saved it had no such state, so zeros.
    std::optional<WantedElements> from;
    at::ScalarType dtype = at::kFloat;
  };
  struct StagedOwned {
    Owned to;
    size_t number = 0;  // of `staging_`, unless they are zeros
  };
  struct StagedPlain {
    at::Tensor to;
    std::string name;  // there
    size_t number = 0;
  };

  // Of the table, by number; nullopt: zeros, see Owned::from.
  struct StagedShaped {
    size_t to = 0;
    std::optional<size_t> number;
  };

  void PlanSlot(const StateTable::Slot& slot, const StateMatch::Place& place,
                bool with_states);
  void PlanPlain(const at::Tensor& tensor, const StateMatch::Place& place);
  void PlanShaped(const StateMatch& match, const std::vector<int>& storages);
  void AddOwned(Owned one);
  // REQUIRES: they are in memory or raised.
  at::Tensor PlaceOf(const Owned& one) const;
  void Put(const StagedOwned& one, const at::Tensor& to) const;
  absl::Status PlaceOwned(const StagedOwned& one) const;
  absl::Status ReadFlat(absl::Span<const Owned> parts,
                        CheckpointReader* reader) const;

  const std::vector<std::shared_ptr<FlatParameter>>& flats_;
  ShardedOptimizer* const optimizer_;
  const StateTable& table_;
  const proto::CheckpointManifest& manifest_;
  Staging staging_;
  std::vector<StagedOwned> staged_;
  std::vector<StagedPlain> plain_;
  std::vector<StagedShaped> shaped_;
  std::vector<WantedElements> in_place_;
  std::vector<at::Tensor> zeros_;  // where those are read to
  std::vector<Owned> read_again_;
};

}  // namespace tessera
#endif  // ENGINE_CHECKPOINT_STATE_READS_H_
