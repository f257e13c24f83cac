// RecomputedUnits: which modules are computed again in backward, of an engine
// that was not told by the module's code. Nobody calls when a module's forward
// begins: it begins with the first operator that uses one of its parameters,
// and ends with the first that uses one of another module's, or of none. It
// begins anew when its first parameter is used again.
//
// What operators a module is made of is seen (sharding/recompute/region.h)
// while gradients are on and no backward runs. The region that is open when
// Backward begins is kept whole: its activations are needed next.
//
// The first time that a module runs operators in some order its tape is
// compared with what it made: a module whose bits differ keeps its activations
// from then on, as one that has operators that cannot be run again does; a
// warning says so, once. Where gathers are collectives that is agreed on by all
// ranks (COLLECTIVE, once for each module), which run the same operators; what
// is compared gathers its parameters. There a tape that is new after the first
// is not compared if it would have to gather, and what it would give up is
// kept.
//
// What a module leaves for its backward all the same (its inputs, what
// operators that are kept made) may be elsewhere in between; or all that it
// saves is, and nothing is computed again (offload/activation_store.h).
//
// Threads: any; each has its own open region.
#ifndef SHARDING_RECOMPUTE_RECOMPUTED_UNITS_H_
#define SHARDING_RECOMPUTE_RECOMPUTED_UNITS_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/string_view.h"
#include "offload/activation_store.h"
#include "sharding/flat/flat_parameter.h"
#include "sharding/recompute/recompute_report.h"

namespace tessera {

enum class ReplayChecks { kFirst, kAlways, kNever };

// Of all modules of an engine.
struct RecomputeOptions {
  // Whether what an operator makes is held, and not computed again, by its
  // name; null: nothing is.
  std::function<bool(absl::string_view op)> keeps;
  // Activations that may be kept at a time, as they come: modules are computed
  // again beyond them. Where gathers are collectives a module counts with as
  // much as the rank that had most when its forward first ended.
  int64_t budget_bytes = 0;
  ReplayChecks checks = ReplayChecks::kFirst;
  // Where what is not given up is in between; null: it stays.
  std::shared_ptr<ActivationStore> store;
  // False, with a store: nothing is computed again.
  bool recomputes = true;
};

class RecomputedUnits {
 public:
  explicit RecomputedUnits(RecomputeOptions options);
  // Forgets the parameters. Open regions are kept whole.
  ~RecomputedUnits();
  RecomputedUnits(const RecomputedUnits&) = delete;
  RecomputedUnits& operator=(const RecomputedUnits&) = delete;

  // The parameter over storage `slot` of `flat` is of the module `name`. Before
  // the first forward. LOCAL.
  void Add(const std::string& name, const FlatParameter* flat, int slot);

  // It is of several modules, or of one and the rest: its use begins and ends
  // none.
  void AddShared(const FlatParameter* flat, int slot);

  // All forwards have ended: a backward begins, or gradients are dropped. What
  // other threads have open is kept whole.
  void EndForward();
  // A backward has ended.
  void EndBackward();

  // Since the last call.
  RecomputeReport TakeReport();

  class Module;  // of this and of the thread's

 private:
  class Shared;
  const std::shared_ptr<Shared> shared_;
  void Enter(std::shared_ptr<Module> module, const FlatParameter* flat,
             int slot);

  std::vector<std::shared_ptr<Module>> modules_;
  std::vector<std::pair<const FlatParameter*, int>> parameters_;
  bool told_ = false;  // that nothing is gained
};

}  // namespace tessera
#endif  // SHARDING_RECOMPUTE_RECOMPUTED_UNITS_H_
