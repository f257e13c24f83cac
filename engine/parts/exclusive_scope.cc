// Why there is a protocol at all. With all-gathers a collective orders every
// read of a shard after the owner's write. With one working copy for all ranks,
// and with served shards, no collective does: a rank reads what others own
// whenever it likes. Without two points that all ranks come to
//
//   - an owner that is done with its backward would step its part while another
//     rank is still in a forward, which then computes with new values in some
//     units and old ones in others, or with half of a write: wrong numbers, and
//     no error;
//   - a rank that is done with its own part would go on to read parts that
//     slower owners have not written yet.
//
// So Enter is an agreement: when it returns every rank has let go of all units
// (pins of autograd's nodes, gathers ahead) and starts no read. And Commit says
// when reads may begin: with a shared copy the next use waits for an all-reduce
// of one number, to which each owner comes after its write (a unit whose states
// lie on a disk is written behind the step, and has one of its own); served
// shards carry a version, and whoever asks for the new one is answered when it
// is there.
//
// Why a rank must not just return with an error between the two. The others
// would wait in Commit's all-reduce until the timeout, or for a version that
// never comes; and this rank would go on with units of which some parts are
// new. So Fail announces the error to those that wait, and makes every later
// use of a unit on this rank return it. An error that all ranks have come to
// (an agreement's) is no such case: all of them Commit it.
//
// Why reads go through it, too. A user's write into a parameter lies in the
// working copy until PrepareUpdate takes it into the masters, and writes the
// owned part of a shared copy: a change, made by a read.
#include "engine/parts/exclusive_scope.h"

#include <utility>

#include "ATen/ops/zeros.h"
#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "base/torch_guard.h"
#include "base/trace/trace.h"
#include "comm/comm_thread.h"
#include "sharding/dispatch/saved_tensors.h"

namespace tessera {
namespace {

// Ends what may keep a unit whole, or read it: pins, and gathers on their way.
void LetGo(EngineParts* parts) {
  ReleaseNodePins();
  parts->schedule->EndPass();
}

// Nobody but Step goes on with updates that have been begun early. An error of
// theirs is PrepareUpdate's.
void DropEarly(EngineParts* parts) {
  if (parts->stream != nullptr) (void)parts->stream->Drain();
}

absl::Status AwaitOthers(EngineParts* parts, const CommFuture& written) {
  absl::Status status;
  for (const auto& flat : parts->flats) {
    status.Update(flat->AwaitOthers(written));
  }
  return status;
}

// The next use of a unit waits until all owners have written it: those of which
// some are changed on behind this, each for its own; the same on all ranks.
absl::Status AwaitOwners(EngineParts* parts) {
  const auto written = [&](const CommFuture& updated) {
    CommTag tag{"end of an update"};
    tag.reason = WaitReason::kPublish;
    if (updated.valid()) tag.ready = [updated] { return updated.Wait(); };
    return parts->comm->AllReduceSum(at::zeros({1}), std::move(tag));
  };
  const CommFuture now = written({});
  absl::Status status;
  for (const auto& flat : parts->flats) {
    const CommFuture updated = flat->states().updated();
    status.Update(flat->AwaitOthers(updated.valid() ? written(updated) : now));
  }
  return status;
}

// Of this rank.
absl::Status AwaitUpdates(EngineParts* parts) {
  absl::Status status;
  for (const auto& flat : parts->flats)
    status.Update(flat->states().updated().Wait());
  return status;
}

}  // namespace

ExclusiveScope::~ExclusiveScope() {
  if (!open_) return;
  (void)Fail(absl::AbortedError(
      absl::StrCat(where_, ": this rank left it before its end")));
}

absl::Status ExclusiveScope::Enter(absl::Status mine, FlatParameter* flat) {
  if (parts_->shares_working_copy || parts_->served != nullptr) {
    LetGo(parts_);
    for (const auto& each : parts_->flats) {
      if (flat != nullptr && each.get() != flat) continue;
      mine.Update(each->CheckUpdatable());
    }
    TESSERA_RETURN_IF_ERROR(parts_->comm->AgreeOk(mine, where_));
  }
  open_ = true;
  return absl::OkStatus();
}

absl::Status ExclusiveScope::Prepare() {
  const TraceScope trace(TraceTrack::kStep, "let go of all units");
  LetGo(parts_);
  if (parts_->before_change) parts_->before_change();
  // All of them, whatever becomes of some: which updates are behind us is to be
  // the same on all ranks (AwaitOwners).
  absl::Status status;
  for (const auto& flat : parts_->flats) {
    status.Update(CatchTorch("update", [&] { return flat->PrepareUpdate(); }));
  }
  return status;
}

absl::Status ExclusiveScope::Begin(absl::Status mine) {
  mine.Update(parts_->CheckNotSummoned());
  DropEarly(parts_);
  TESSERA_RETURN_IF_ERROR(Enter(mine));
  if (mine.ok()) mine = Prepare();
  const absl::Status agreed = parts_->comm->AgreeOk(mine, where_);
  if (!agreed.ok()) Dismiss();
  return agreed;
}

absl::Status ExclusiveScope::BeginOne(FlatParameter* flat) {
  DropEarly(parts_);
  TESSERA_RETURN_IF_ERROR(Enter(absl::OkStatus(), flat));
  LetGo(parts_);
  if (parts_->before_change) parts_->before_change();
  const absl::Status agreed = parts_->comm->AgreeOk(
      CatchTorch(where_, [&] { return flat->PrepareUpdate(); }), where_);
  if (!agreed.ok()) Dismiss();
  return agreed;
}

absl::Status ExclusiveScope::Commit(absl::Status status) {
  if (parts_->served != nullptr) {
    const absl::Status updated = AwaitUpdates(parts_);
    if (!updated.ok()) return Fail(updated);
    parts_->served->EndUpdate();
  }
  open_ = false;
  if (parts_->shares_working_copy) status.Update(AwaitOwners(parts_));
  return status;
}

absl::Status ExclusiveScope::Fail(const absl::Status& status) {
  open_ = false;
  return FailAll(parts_, status);
}

absl::Status ExclusiveScope::FailAll(EngineParts* parts,
                                     const absl::Status& status) {
  parts->comm->Announce(status);
  if (parts->served != nullptr) parts->served->FailUpdate(status);
  (void)AwaitOthers(parts, DoneFuture(status));
  return status;
}

}  // namespace tessera
