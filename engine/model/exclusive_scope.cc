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
#include "engine/model/exclusive_scope.h"

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
void LetGo(UpdateGuard* guard) {
  ReleaseNodePins();
  guard->model().schedule()->EndPass();
}

// Nobody but Step goes on with updates that have been begun early. An error of
// theirs is PrepareUpdate's.
void DropEarly(UpdateGuard* guard) {
  if (guard->stream() != nullptr) (void)guard->stream()->Drain();
}

absl::Status AwaitOthers(UpdateGuard* guard, const CommFuture& written) {
  absl::Status status;
  for (const auto& flat : guard->model().flats()) {
    status.Update(flat->AwaitOthers(written));
  }
  return status;
}

// The next use of a unit waits until all owners have written it: those of which
// some are changed on behind this, each for its own; the same on all ranks.
absl::Status AwaitOwners(UpdateGuard* guard) {
  const auto written = [&](const CommFuture& updated) {
    CommTag tag{"end of an update"};
    tag.reason = WaitReason::kPublish;
    if (updated.valid()) tag.ready = [updated] { return updated.Wait(); };
    return guard->comm()->AllReduceSum(at::zeros({1}), std::move(tag));
  };
  const CommFuture now = written({});
  absl::Status status;
  for (const auto& flat : guard->model().flats()) {
    const CommFuture updated = flat->states().updated();
    status.Update(flat->AwaitOthers(updated.valid() ? written(updated) : now));
  }
  return status;
}

// Waits until this rank's updates are done.
absl::Status AwaitUpdates(UpdateGuard* guard) {
  absl::Status status;
  for (const auto& flat : guard->model().flats()) {
    status.Update(flat->states().updated().Wait());
  }
  return status;
}

}  // namespace

ExclusiveScope::~ExclusiveScope() {
  if (!open_) return;
  (void)Fail(absl::AbortedError(
      absl::StrCat(where_, ": this rank left it before its end")));
}

absl::Status ExclusiveScope::Enter(absl::Status mine, FlatParameter* flat) {
  if (guard_->one_copy() || guard_->served() != nullptr) {
    LetGo(guard_);
    for (const auto& each : guard_->model().flats()) {
      if (flat != nullptr && each.get() != flat) continue;
      mine.Update(each->CheckNotHeld());
    }
    TESSERA_RETURN_IF_ERROR(guard_->comm()->AgreeOk(mine, where_));
  }
  if (guard_->served() != nullptr) guard_->served()->BeginUpdate();
  open_ = true;
  return absl::OkStatus();
}

absl::Status ExclusiveScope::Prepare() {
  const TraceScope trace(TraceTrack::kStep, "let go of all units");
  LetGo(guard_);
  guard_->BeforeChange();
  // All of them, whatever becomes of some: which updates are behind us is to be
  // the same on all ranks (AwaitOwners).
  absl::Status status;
  for (const auto& flat : guard_->model().flats()) {
    status.Update(CatchTorch("update", [&] { return flat->PrepareUpdate(); }));
  }
  return status;
}

absl::Status ExclusiveScope::Begin(absl::Status mine) {
  mine.Update(guard_->life().CheckNotSummoned());
  DropEarly(guard_);
  TESSERA_RETURN_IF_ERROR(Enter(mine));
  if (mine.ok()) mine = Prepare();
  const absl::Status agreed = guard_->comm()->AgreeOk(mine, where_);
  if (!agreed.ok()) Dismiss();
  return agreed;
}

absl::Status ExclusiveScope::BeginOne(FlatParameter* flat) {
  DropEarly(guard_);
  TESSERA_RETURN_IF_ERROR(Enter(absl::OkStatus(), flat));
  LetGo(guard_);
  guard_->BeforeChange();
  const absl::Status agreed = guard_->comm()->AgreeOk(
      CatchTorch(where_, [&] { return flat->PrepareUpdate(); }), where_);
  if (!agreed.ok()) Dismiss();
  return agreed;
}

absl::Status ExclusiveScope::Commit(absl::Status status) {
  if (guard_->served() != nullptr) {
    const absl::Status updated = AwaitUpdates(guard_);
    if (!updated.ok()) return Fail(updated);
    guard_->served()->EndUpdate();
  }
  open_ = false;
  if (guard_->one_copy()) status.Update(AwaitOwners(guard_));
  return status;
}

absl::Status ExclusiveScope::Fail(const absl::Status& status) {
  open_ = false;
  return FailAll(guard_, status);
}

absl::Status ExclusiveScope::FailAll(UpdateGuard* guard,
                                     const absl::Status& status) {
  guard->comm()->Announce(status);
  if (guard->served() != nullptr) guard->served()->FailUpdate(status);
  (void)AwaitOthers(guard, DoneFuture(status));
  return status;
}

}  // namespace tessera
