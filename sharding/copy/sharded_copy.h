// Working copies of which this rank keeps a shard, made whole for each use and
// freed after it (stage 3).
#ifndef SHARDING_COPY_SHARDED_COPY_H_
#define SHARDING_COPY_SHARDED_COPY_H_

#include <atomic>
#include <cstdint>
#include <memory>

#include "offload/disk/swap_file.h"
#include "offload/update_stream.h"
#include "sharding/copy/working_copy.h"

namespace tessera {

// ShardedCopy: what GatheredCopy and ServedCopy have in common.
class ShardedCopy : public WorkingCopy {
 public:
  void Drop() override;
  absl::Status StartGather() override;
  absl::Status AwaitArrival() override;
  void Free() override { DropWhole(); }
  void Publish(CommFuture updated) override { updated_ = std::move(updated); }
  absl::Status PrepareReceive() override;

 protected:
  ShardedCopy(const FlatDescription* flat, ShardStates* states, Traits traits,
              std::atomic<int64_t>* live);
  // Starts the gather to whole(). On an error nothing was started.
  virtual absl::StatusOr<CommFuture> Launch() = 0;
  // Allocates memory for what Free leaves besides the shard.
  virtual absl::Status AllocateSecondary() { return absl::OkStatus(); }
  // Allocates the memory of whole().
  virtual absl::StatusOr<FlatBuffer> AllocateWhole();

  CommFuture updated_;  // the shard's update; Launch runs after it

 private:
  absl::Status MakeWhole();
  void DropWhole();

  std::atomic<int64_t>* const live_;  // not owned
};

// GatheredCopy: gathered by an all-gather; with a reshard group a backward
// gathers within that group, from what the forward left there. A shard on a
// disk or on the host is read to its place in the whole copy, and gathered from
// there.
class GatheredCopy : public ShardedCopy {
 public:
  GatheredCopy(const FlatDescription* flat, ShardStates* states,
               std::atomic<int64_t>* live);

  void Drop() override;
  absl::Status AwaitArrival() override;
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

  // Secondary shard [P / n]; it holds values from the end of a forward to the
  // next border.
  FlatBuffer secondary_;
  bool secondary_holds_ = false;
  // The read of a shard on a disk, to whole(), or for a device to landing_.
  struct Reading {
    SwapFuture read;
    std::shared_ptr<const UpdateStream::Fetch> fetch;  // while it is changed
    absl::Status Wait() const;
  };
  Reading reading_;
  at::Tensor landing_;
};

// ServedCopy: gathered by reading the others' shards, whatever they do
// meanwhile (sharding/copy/served_gathers.h).
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
