// The scopes of an Engine (engine/engine.h): objects that change what its calls
// do for as long as they live.
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

// With torch_autocast.enabled, libtorch's autocast in that dtype while it
// lives: hold one around forward (not around Backward). Otherwise nothing, so a
// program may always hold it.
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

// While it is open parameters are whole, in place; see Engine::Summon.
class [[nodiscard]] SummonScope {
 public:
  struct State;
  explicit SummonScope(std::unique_ptr<State> state);  // for Engine
  SummonScope(SummonScope&&) noexcept;
  SummonScope& operator=(SummonScope&&) noexcept;
  // Without Close: what was written is taken back, with an error in the log if
  // it was to be kept. LOCAL, but end it on all ranks.
  ~SummonScope();
  // Ends the scope: what was written reaches the masters, and the working
  // copies of all ranks; or nobody. Nothing afterwards. FailedPrecondition if a
  // tessera::Use holds the units, too; the scope stays open then. COLLECTIVE.
  absl::Status Close();

 private:
  std::unique_ptr<State> state_;
};

}  // namespace tessera
#endif  // ENGINE_ENGINE_SCOPES_H_
