// ExclusiveScope: the time in which no rank uses parameters, and owners may
// read or change their masters: a step, a load, a checkpoint, a state dict.
//
//   ExclusiveScope scope(guard, "Engine::SetMaster");
//   TESSERA_RETURN_IF_ERROR(scope.Begin());         // all ranks are here
//   const absl::Status written = ...;               // this rank's part
//   if (!written.ok()) return scope.Fail(written);  // here alone, perhaps
//   return scope.Commit();                          // used again by all
//
// Every call of an engine that reads or changes masters opens one, also calls
// that change nothing for the user: what the user wrote into parameters reaches
// the masters only here. The destructor fails a scope that was not committed,
// failed or dismissed.
//
// exclusive_scope.cc says why, and what would break otherwise.
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

  // Calls Enter and Prepare, and agrees that all ranks have done both; early
  // updates are dropped (offload/update_stream.h). `mine`: this rank's error,
  // if any. FailedPrecondition, identical on all ranks, if a tessera::Use holds
  // a unit or a scope of Engine::Summon is open. After an error the scope is
  // not open. COLLECTIVE.
  absl::Status Begin(absl::Status mine = absl::OkStatus());
  // As Begin, for one flat only. COLLECTIVE.
  absl::Status BeginOne(FlatParameter* flat);

  // The first half of Begin, for callers that agree later: from here until the
  // commit no rank reads what others own. Errors are identical on all ranks;
  // the scope is not open then. Where ranks read only in collectives, nothing
  // is agreed on and `mine` is not looked at: the caller fails the scope then.
  // `flat`: only this flat counts. COLLECTIVE.
  absl::Status Enter(absl::Status mine, FlatParameter* flat = nullptr);
  // The second half of Begin: calls PrepareUpdate on all flats. LOCAL.
  absl::Status Prepare();

  // Ends the scope: from the next use on, units have the values that their
  // owners have set. `status`: an error that all ranks agree on, which is
  // returned; what has been changed stays. COLLECTIVE, and ASYNC with overlap,
  // with a shared working copy; else LOCAL: with served shards it waits for
  // updates on a disk.
  absl::Status Commit(absl::Status status = absl::OkStatus());
  // Ends the scope where this rank could not do its part: nobody uses what the
  // other ranks changed. Returns `status`. LOCAL.
  absl::Status Fail(const absl::Status& status);
  // Ends the scope and does nothing else: no unit will be used any more
  // (Engine::Close), or the next scope continues where this one stopped. LOCAL.
  void Dismiss() { open_ = false; }

  // Does what Fail does, for a failure before a scope could begin.
  static absl::Status FailAll(UpdateGuard* guard, const absl::Status& status);

 private:
  UpdateGuard* const guard_;
  const std::string where_;
  bool open_ = false;
};

}  // namespace tessera
#endif  // ENGINE_MODEL_EXCLUSIVE_SCOPE_H_
