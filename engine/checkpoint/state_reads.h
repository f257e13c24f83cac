// StateReads: what a load reads of a checkpoint, and how it comes to its place.
//
//   lies                at first, all together       then
//   in memory           read to memory of its own    Place: copied
//   in memory, zeros    read to its place            -
//   on a disk, or is    verified, and not kept       ReadAgain: read again, to
//   of 8 bits                                        its place, flat by flat
//
// Until Place, Undo restores all that has changed. state_reads.cc says why some
// of it is read twice.
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

// Staging: memory for numbers of the checkpoint that are copied to their places
// later.
class Staging {
 public:
  // Adds numbers to be read; returns their index.
  size_t Add(const WantedElements& wanted, at::ScalarType dtype);
  // Takes memory for all that were added. ResourceExhausted.
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
  // All arguments outlive this; `optimizer` may be null.
  StateReads(const std::vector<std::shared_ptr<FlatParameter>>& flats,
             ShardedOptimizer* optimizer, const StateTable& table,
             const proto::CheckpointManifest& manifest)
      : flats_(flats),
        optimizer_(optimizer),
        table_(table),
        manifest_(manifest) {}

  // Checks that the tensors of `match` that each rank has whole may be written
  // in place. LOCAL. FailedPrecondition.
  absl::Status CheckWritable(const StateMatch& match) const;
  // Plans the reads of all that this rank has of `match`, and takes the memory
  // for them. Only values of flats are read, unless `with_states`. LOCAL.
  // ResourceExhausted.
  absl::Status Plan(const StateMatch& match, bool with_states);
  // Returns what ReadCheckpoint is to read.
  std::vector<WantedElements> Wanted() const;
  // Restores what has changed, where ReadCheckpoint or anything else before
  // Place fails. LOCAL.
  void Undo();
  // Takes this rank's own `values` of plain tensors, in place of rank 0's.
  // LOCAL. DataLoss.
  absl::Status TakeOwn(const std::map<std::string, std::string>& values);

  // Copies what has been read to its place and frees the memory that it was
  // read to. LOCAL.
  absl::Status Place();
  // Reads again, after Place, what was verified and not kept (see above).
  // LOCAL, blocking. Errors are the disks'; some states have changed then.
  absl::Status ReadAgain(CheckpointReader* reader);

 private:
  // Owned elements [begin, end) of a state of a flat.
  struct Owned {
    int flat = 0;
    StateTable::State kind = StateTable::kValue;
    Range range;
    // Where the checkpoint has them, and in which dtype; nullopt: they become
    // zeros, since they were never stepped there while others of the flat were,
    // or since the run that saved it had no such state.
    std::optional<WantedElements> from;
    at::ScalarType dtype = at::kFloat;
  };
  struct StagedOwned {
    Owned to;
    size_t number = 0;  // of `staging_`, unless they are zeros
  };
  // A tensor that each rank has whole.
  struct StagedWhole {
    at::Tensor to;
    std::string name;              // there; "": it is a shaped state
    std::optional<size_t> number;  // of `staging_`; nullopt: see Owned::from
  };

  void PlanSlot(const StateTable::Slot& slot, const StateMatch::Place& place,
                bool with_states);
  void PlanPlain(const at::Tensor& tensor, const StateMatch::Place& place);
  void PlanShaped(const StateMatch& match);
  void AddOwned(Owned one);
  // Returns the elements' place. REQUIRES: they are in memory or raised.
  at::Tensor PlaceOf(const Owned& one) const;
  void Put(const StagedOwned& one, const at::Tensor& to) const;
  absl::Status PlaceOwned(const StagedOwned& one) const;
  absl::Status PlaceSplit(const StagedOwned& one) const;
  absl::Status ReadFlat(absl::Span<const Owned> parts,
                        CheckpointReader* reader) const;

  const std::vector<std::shared_ptr<FlatParameter>>& flats_;
  ShardedOptimizer* const optimizer_;
  const StateTable& table_;
  const proto::CheckpointManifest& manifest_;
  Staging staging_;
  std::vector<StagedOwned> staged_;
  std::vector<StagedWhole> whole_;
  std::vector<WantedElements> in_place_;
  std::vector<at::Tensor> zeros_;  // where zeros are read to
  std::vector<Owned> read_again_;
};

}  // namespace tessera
#endif  // ENGINE_CHECKPOINT_STATE_READS_H_
