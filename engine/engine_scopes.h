// Scopes of an Engine (engine/engine.h): objects that change what its calls do
// for as long as they live.
#ifndef ENGINE_ENGINE_SCOPES_H_
#define ENGINE_ENGINE_SCOPES_H_

#include <memory>

#include "absl/status/status.h"

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
