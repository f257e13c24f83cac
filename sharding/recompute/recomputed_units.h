// RecomputedUnits: recomputes modules in backward without a change to their
// code. As nothing announces a module's forward, it is taken to begin with the
// first operator that uses one of its parameters, and to end with the first
// that uses a parameter of another module, or of none. It begins anew when its
// first parameter is used again.
//
// A module's operators are recorded (sharding/recompute/region.h) while
// gradients are on and no backward runs. The region that is open when Backward
// begins is kept whole: its activations are needed next.
//
// The first time that a module runs operators in some order its tape is
// compared with what it made. What has other bits is held from then on: all
// that an operator made if floating-point numbers differ, else that tensor
// alone. A module that has operators which cannot be run again, or other bits
// in memory that is written twice, keeps its activations; a warning says so,
// once. Where gathers are collectives that is agreed on by all ranks
// (COLLECTIVE, once for each module), which run the same operators; what is
// compared gathers its parameters. There a tape that is new after the first is
// not compared if it would have to gather, and what it would give up is kept.
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

// Options for all modules of an engine.
struct RecomputeOptions {
  // Whether an operator's results are held and not recomputed, by its name;
  // null: none are.
  std::function<bool(absl::string_view op)> keeps;
  // Activations that may be kept at a time, as they come: modules are computed
  // again beyond them. Where gathers are collectives a module counts with as
  // much as the rank that had most when its forward first ended.
  int64_t budget_bytes = 0;
  ReplayChecks checks = ReplayChecks::kFirst;
  // Where tensors that are not given up are kept in the meantime; null: they
  // stay.
  std::shared_ptr<ActivationStore> store;
  // False, with a store: nothing is recomputed.
  bool recomputes = true;
};

class RecomputedUnits {
 public:
  explicit RecomputedUnits(RecomputeOptions options);
  // Forgets the parameters. Open regions are kept whole.
  ~RecomputedUnits();
  RecomputedUnits(const RecomputedUnits&) = delete;
  RecomputedUnits& operator=(const RecomputedUnits&) = delete;

  // Assigns the parameter over storage `slot` of `flat` to the module `name`.
  // Call it before the first forward. LOCAL.
  void Add(const std::string& name, const FlatParameter* flat, int slot);

  // Adds a parameter that several modules share, or one and the rest: its use
  // begins and ends no module.
  void AddShared(const FlatParameter* flat, int slot);

  // Ends all forwards: a backward begins, or gradients are dropped. Regions
  // that are open on other threads are kept whole.
  void EndForward();
  // Called when a backward has ended.
  void EndBackward();

  // Returns the report since the last call.
  RecomputeReport TakeReport();

  class Module;  // of this and of the thread's

 private:
  class Shared;
  const std::shared_ptr<Shared> shared_;
  void Enter(std::shared_ptr<Module> module, const FlatParameter* flat,
             int slot);

  std::vector<std::shared_ptr<Module>> modules_;
  std::vector<std::pair<const FlatParameter*, int>> parameters_;
  bool told_ = false;  // the warning that nothing is gained was given
};

}  // namespace tessera
#endif  // SHARDING_RECOMPUTE_RECOMPUTED_UNITS_H_
