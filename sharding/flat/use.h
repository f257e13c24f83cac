// Use: keeps parameters whole for as long as it lives.
//
// Code that reads a parameter through a raw pointer, outside of any operator,
// gets an error that names the parameter while its unit is freed. One line
// fixes it:
//
//   auto pin = tessera::Use(w);
//   Kernel(x.data_ptr<float>(), w.data_ptr<float>());
//
// A module's constructor under ConstructSharded needs it around an accessor
// that is used while operators run, or after some of them.
//
// A write through the pointer is kept: make the same one on all ranks. End the
// scope before Step, LoadCheckpoint or Close, which refuse otherwise. Where
// the ranks of a host share one working copy a Use costs a copy of the unit,
// which stays until the next update. COLLECTIVE where the unit is not whole and
// gathers are collectives (one all-gather): all ranks must make the same uses
// in the same order. Throws what a gather throws. Tensors that no engine owns
// cost nothing.
#ifndef SHARDING_FLAT_USE_H_
#define SHARDING_FLAT_USE_H_

#include <memory>
#include <vector>

#include "ATen/core/Tensor.h"

namespace tessera {

class [[nodiscard]] Use {
 public:
  explicit Use(const at::Tensor& tensor);
  explicit Use(const std::vector<at::Tensor>& tensors);
  ~Use();
  Use(Use&&) noexcept;
  Use& operator=(Use&&) noexcept;

 private:
  struct Pins;
  std::unique_ptr<Pins> pins_;
};

}  // namespace tessera
#endif  // SHARDING_FLAT_USE_H_
