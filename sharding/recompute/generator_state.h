// GeneratorState: where a generator stands, so that what an operator
// draws can be drawn again.
#ifndef SHARDING_RECOMPUTE_GENERATOR_STATE_H_
#define SHARDING_RECOMPUTE_GENERATOR_STATE_H_

#include <optional>

#include "ATen/CPUGeneratorImpl.h"
#include "ATen/core/Generator.h"
#include "ATen/core/Tensor.h"

namespace tessera {

class GeneratorState {
 public:
  // LOCAL. A CPU generator's takes 0.1 us and 2.5 KB.
  explicit GeneratorState(const at::Generator& generator);

  // The generator has drawn nothing since, nor been set.
  bool IsCurrent() const;
  void Restore() const;
  // Another generator, of the same kind, that stands there.
  at::Generator Clone() const;
  const at::Generator& generator() const { return generator_; }

 private:
  void SetTo(at::Generator generator) const;

  at::Generator generator_;
  // A CPU generator's...
  std::optional<at::mt19937> engine_;
  std::optional<float> next_float_;
  std::optional<double> next_double_;
  // ... or another's.
  at::Tensor state_;
};

// The default generator of a device; undefined where there is none.
at::Generator DefaultGeneratorOf(at::Device device);

}  // namespace tessera
#endif  // SHARDING_RECOMPUTE_GENERATOR_STATE_H_
