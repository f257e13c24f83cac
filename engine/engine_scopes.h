// Scopes of an Engine (engine/engine.h): objects that change what its calls do
// for as long as they live.
#ifndef ENGINE_ENGINE_SCOPES_H_
#define ENGINE_ENGINE_SCOPES_H_

#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "sharding/flat/use.h"  // IWYU pragma: export

namespace tessera {

class Engine;

// Backward reduces nothing while this lives: PyTorch's no_sync().
class [[nodiscard]] NoSyncScope {
 public:
  explicit NoSyncScope(Engine* engine);
  ~NoSyncScope();
  NoSyncScope(const NoSyncScope&) = delete;
  NoSyncScope& operator=(const NoSyncScope&) = delete;

 private:
  Engine* engine_;
};

// Enables libtorch's autocast while it lives, with torch_autocast.enabled and
// in its dtype: hold one around forward (not around Backward). Otherwise it
// does nothing, so a program may always hold it.
class [[nodiscard]] AutocastScope {
 public:
  explicit AutocastScope(Engine* engine);
  ~AutocastScope();
  AutocastScope(const AutocastScope&) = delete;
  AutocastScope& operator=(const AutocastScope&) = delete;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// Evaluates the engine's module while it lives: the module and all modules in
// it are in evaluation mode (Module::eval), and libtorch records no gradients
// on this thread. At the end each module has the mode that it had. Hold an
// AutocastScope around each forward, too. The engine outlives it. LOCAL.
class [[nodiscard]] EvalScope {
 public:
  explicit EvalScope(Engine* engine);
  ~EvalScope();
  EvalScope(const EvalScope&) = delete;
  EvalScope& operator=(const EvalScope&) = delete;

  // Returns the error of the lowest rank whose forward within the scope failed,
  // on all ranks, or OK; `mine` says how this rank's ended. Where gathers are
  // collectives (engine/engine.h) the other ranks may be inside one when a rank
  // fails: this rank then returns its own error within seconds, theirs name it,
  // and the engine has to be given up, unless all ranks failed. COLLECTIVE,
  // blocking.
  absl::Status Agree(const absl::Status& mine);

 private:
  struct State;
  Engine* const engine_;
  std::unique_ptr<State> state_;
};

// Puts the averages in place of the parameters (Engine::SwapInAverages) while
// it is open.
class [[nodiscard]] AveragesScope {
 public:
  // Errors are those of Engine::SwapInAverages. `engine` outlives the scope.
  // COLLECTIVE.
  static absl::StatusOr<AveragesScope> Open(Engine* engine);
  AveragesScope(AveragesScope&& other) noexcept;
  AveragesScope& operator=(AveragesScope&&) = delete;
  // Closes the scope if it is open; an error goes to the log. COLLECTIVE then.
  ~AveragesScope();
  // Swaps the averages out. A second Close does nothing. Errors are those of
  // Engine::SwapOutAverages. COLLECTIVE.
  absl::Status Close();

 private:
  explicit AveragesScope(Engine* engine) : engine_(engine) {}
  Engine* engine_;  // null: closed
};

// Parameters are whole, in place, while this is open; see Engine::Summon.
class [[nodiscard]] SummonScope {
 public:
  struct State;
  explicit SummonScope(std::unique_ptr<State> state);  // for Engine
  SummonScope(SummonScope&&) noexcept;
  SummonScope& operator=(SummonScope&&) noexcept;
  // If it was not closed, discards what was written, with an error in the log
  // if that was to be kept. LOCAL, but end it on all ranks.
  ~SummonScope();
  // Ends the scope: with SummonOptions::writeback what was written reaches the
  // masters and the working copies of all ranks, else it is discarded. A second
  // Close does nothing. FailedPrecondition if a tessera::Use holds the units,
  // too; the scope stays open then. COLLECTIVE.
  absl::Status Close();

 private:
  std::unique_ptr<State> state_;
};

}  // namespace tessera
#endif  // ENGINE_ENGINE_SCOPES_H_
