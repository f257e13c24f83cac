// Copies of which this rank keeps a shard, made whole for each use and freed
// after it (stage 3).
#ifndef SHARDING_COPY_SHARDED_COPY_H_
#define SHARDING_COPY_SHARDED_COPY_H_

#include <atomic>
#include <cstdint>
#include <memory>

#include "offload/disk/swap_file.h"
#include "offload/update_stream.h"
#include "sharding/copy/working_copy.h"

namespace tessera {

// What the two of them have in common.
class ShardedCopy : public WorkingCopy {
 public:
  void Drop() override;
  absl::Status StartGather() override;
  absl::Status Settle() override;
  void Free() override { DropWhole(); }
  void Publish(CommFuture updated) override { updated_ = std::move(updated); }
  absl::Status PrepareReceive() override;

 protected:
  ShardedCopy(const FlatDescription* flat, ShardStates* states, Traits traits,
              std::atomic<int64_t>* live);
  // The gather itself, to whole(). On an error nothing was started.
  virtual absl::StatusOr<CommFuture> Launch() = 0;
  // Memory for what Free will leave besides the shard.
  virtual absl::Status AllocateSecondary() { return absl::OkStatus(); }
  // Memory that whole() is to be.
  virtual absl::StatusOr<FlatBuffer> AllocateWhole();

  CommFuture updated_;  // of the shard; Launch comes after it

 private:
  absl::Status MakeWhole();
  void DropWhole();

  std::atomic<int64_t>* const live_;  // not owned
};

// Gathered by an all-gather, for a backward perhaps within a group of
// neighbours, from what the forward left with them. The shard may lie on a
// disk, or on the host: it is read to its place in the whole copy, and gathered
// from there.
class GatheredCopy : public ShardedCopy {
 public:
  GatheredCopy(const FlatDescription* flat, ShardStates* states,
               std::atomic<int64_t>* live);

  void Drop() override;
  absl::Status Settle() override;
  void Free() override;
  void DropSecondary() override;

 protected:
  GatheredCopy(const FlatDescription* flat, ShardStates* states, Traits traits,
               std::atomic<int64_t>* live)
      : ShardedCopy(flat, states, traits, live) {}
  absl::StatusOr<CommFuture> Launch() override;

 private:
  absl::StatusOr<CommFuture> LaunchFromDisk(CommTag tag);
  absl::StatusOr<at::Tensor> MakeLanding() const;
  absl::StatusOr<CommFuture> LaunchFromHost(CommTag tag);
  absl::StatusOr<CommFuture> CopyFromHost();
  absl::Status AllocateSecondary() override;

  // [P / n]; holds values from the end of a forward to the next border.
  FlatBuffer secondary_;
  bool secondary_holds_ = false;
  // Of a shard on a disk, to whole(), or for a device to landing_.
  struct Reading {
    SwapFuture read;
    std::shared_ptr<const UpdateStream::Fetch> fetch;  // while it is changed
    absl::Status Wait() const;
  };
  Reading reading_;
  at::Tensor landing_;
};

// Gathered by reading the others' shards, whatever they do meanwhile
// (sharding/copy/served_gathers.h).
class ServedCopy : public ShardedCopy {
 public:
  ServedCopy(const FlatDescription* flat, ShardStates* states,
             std::atomic<int64_t>* live)
      : ShardedCopy(flat, states, Traits(), live) {}

  void Offer() override;
  void Drop() override;
  bool MustStay(bool written) const override { return written; }

 private:
  absl::StatusOr<CommFuture> Launch() override;
};

}  // namespace tessera
#endif  // SHARDING_COPY_SHARDED_COPY_H_
