// GradientPlaces: gives the results of a backward's operators the places of the
// gradients that they will be, as far as that is known.
//
//   at::empty, within a backward --> GradientForecast --> FlatGradient::Lend
//                                          |  another's
//                                          +-----------> libtorch's memory
//
// A large gradient on the CPU is written where it is summed, then, and never
// copied.
//
// Threads: Allocate takes `mutex`; Arrived is called by who holds it; Backward
// is of the thread that runs one.
#ifndef SHARDING_GRADIENT_GRADIENT_PLACES_H_
#define SHARDING_GRADIENT_GRADIENT_PLACES_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/synchronization/mutex.h"
#include "base/torch/tensor_memory.h"
#include "sharding/gradient/flat_gradient.h"
#include "sharding/gradient/gradient_forecast.h"

namespace tessera {

class GradientPlaces final : public TensorMemorySource {
 public:
  using Flats = std::vector<std::unique_ptr<FlatGradient>>;

  // `flats`, `mutex`, which orders their calls, and what `arrival` uses outlive
  // this. `arrival`: how gradients of a flat arrive in the backward that runs;
  // nothing: no place is to be given for them.
  using Arrival = std::function<std::optional<FlatGradient::Arrival>(
      const FlatGradient& flat)>;
  GradientPlaces(const Flats& flats, absl::Mutex* mutex, Arrival arrival);

  // For its life, this thread's tensors come from Allocate.
  class Backward {
   public:
    explicit Backward(GradientPlaces* places);
    ~Backward();
    Backward(const Backward&) = delete;
    Backward& operator=(const Backward&) = delete;

   private:
    GradientPlaces* const places_;
    std::optional<TensorMemoryScope> scope_;  // where any place can be given
  };

  c10::DataPtr Allocate(int64_t bytes, c10::Allocator& base) override;

  // In a Backward, before it is added.
  void Arrived(int flat, int parameter, const at::Tensor& gradient);

 private:
  absl::Mutex* const mutex_;
  const Arrival arrival_;
  std::vector<std::pair<FlatGradient*, int>> parameters_;  // of the model
  std::vector<int> begins_;  // of a flat's, in parameters_
  GradientForecast forecast_;
};

}  // namespace tessera
#endif  // SHARDING_GRADIENT_GRADIENT_PLACES_H_
