// GradientPlaces: gives the results of a backward's operators the places of the
// gradients that they will be, as far as that is known.
//
//   at::empty, within a backward --> GradientForecast --> UnitGradient::Lend
//                                          |  another's
//                                          +-----------> libtorch's memory
//
// A large gradient on the CPU is written where it is summed, then, and never
// copied: at 151.7 M parameters the copies took 4 % of a step.
//
// Threads: Allocate on any; the other calls by who holds `mutex`, or before.
#ifndef SHARDING_GRADIENT_PLACES_H_
#define SHARDING_GRADIENT_PLACES_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/synchronization/mutex.h"
#include "sharding/gradient_forecast.h"
#include "sharding/tensor_memory.h"
#include "sharding/unit_gradient.h"

namespace tessera {

class GradientPlaces final : public TensorMemorySource {
 public:
  using Units = std::vector<std::unique_ptr<UnitGradient>>;

  // `units`, `mutex`, which orders their calls, and what `arrival` uses outlive
  // this. `arrival`: how gradients arrive in the backward that runs.
  GradientPlaces(const Units& units, absl::Mutex* mutex,
                 std::function<UnitGradient::Arrival()> arrival);

  c10::DataPtr Allocate(int64_t bytes, c10::Allocator& base) override;

  void Begin() { forecast_.Begin(); }  // a backward
  // Before it is added.
  void Arrived(int unit, int parameter, const at::Tensor& gradient);
  void End() { forecast_.End(); }

 private:
  absl::Mutex* const mutex_;
  const std::function<UnitGradient::Arrival()> arrival_;
  std::vector<std::pair<UnitGradient*, int>> parameters_;  // of the model
  std::vector<int> begins_;  // of a unit's, in parameters_
  GradientForecast forecast_;
};

}  // namespace tessera
#endif  // SHARDING_GRADIENT_PLACES_H_
