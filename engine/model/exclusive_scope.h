// ExclusiveScope: the time in which no rank uses parameters, and owners may
// read or change their masters: a step, a load, a checkpoint, a state dict.
//
//   ExclusiveScope scope(guard, "Engine::SetMaster");
//   TESSERA_RETURN_IF_ERROR(scope.Begin());         // all ranks are here
//   const absl::Status written = ...;               // this rank's part
//   if (!written.ok()) return scope.Fail(written);  // here alone, perhaps
//   return scope.Commit();                          // used again by all
//
// Every call of an engine that reads or changes masters goes through one, also
// those that change nothing for the user: what he wrote into parameters gets
// into the masters only here. One that is neither committed nor failed nor
// dismissed at its end is failed then.
//
// Why, and what would break otherwise, stands in exclusive_scope.cc.
#ifndef ENGINE_MODEL_EXCLUSIVE_SCOPE_H_
#define ENGINE_MODEL_EXCLUSIVE_SCOPE_H_

#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "engine/model/update_guard.h"

namespace tessera {

class ExclusiveScope {
 public:
  // `guard` outlives this. `where` is for messages: the call of the engine.
  ExclusiveScope(UpdateGuard* guard, absl::string_view where)
      : guard_(guard), where_(where) {}
  ~ExclusiveScope();
  ExclusiveScope(const ExclusiveScope&) = delete;
  ExclusiveScope& operator=(const ExclusiveScope&) = delete;

  // Enter and Prepare, and an agreement that all ranks have done both; updates
  // that were begun early are dropped (offload/update_stream.h). `mine`:
  // what is wrong here, if anything is. FailedPrecondition if a tessera::Use
  // holds a unit, or a scope of Engine::Summon is open; the same on all ranks;
  // the scope is not open then. COLLECTIVE.
  absl::Status Begin(absl::Status mine = absl::OkStatus());
  // The same for one flat alone. COLLECTIVE.
  absl::Status BeginOne(FlatParameter* flat);

  // The first half of Begin, for those that come to an agreement later. From
  // here on no rank reads what others own, until they commit. The same error on
  // all ranks; the scope is not open then. Where ranks read only in collectives
  // nothing is agreed on, whatever `mine` is: the caller fails the scope then.
  // `flat`: no other counts. COLLECTIVE.
  absl::Status Enter(absl::Status mine, FlatParameter* flat = nullptr);
  // The second half: all flats are PrepareUpdate'd. LOCAL.
  absl::Status Prepare();

  // Ends the scope: from the next use on a unit is what all owners have made of
  // it. `status`: an error that all ranks have come to, returned; what has been
  // changed stays. COLLECTIVE, ASYNC with overlap, with a shared working copy;
  // else LOCAL: with served shards it waits for what a disk updates.
  absl::Status Commit(absl::Status status = absl::OkStatus());
  // Ends the scope where this rank could not do its part: what the others made
  // of theirs is used by nobody. Returns `status`. LOCAL.
  absl::Status Fail(const absl::Status& status);
  // Ends the scope, and nothing else: no unit will be used any more
  // (Engine::Close), or the next scope goes on where this one stopped. LOCAL.
  void Dismiss() { open_ = false; }

  // What Fail does, where a failure comes before a scope could begin.
  static absl::Status FailAll(UpdateGuard* guard, const absl::Status& status);

 private:
  UpdateGuard* const guard_;
  const std::string where_;
  bool open_ = false;
};

}  // namespace tessera
#endif  // ENGINE_MODEL_EXCLUSIVE_SCOPE_H_
