#include "sharding/use.h"

#include "base/torch_guard.h"
#include "sharding/construction.h"
#include "sharding/registry.h"
#include "sharding/unit.h"

namespace tessera {

struct Use::Pins {
  PinSet set;
  EvictablePins evictables;
  void Add(const at::Tensor& tensor) {
    Owned owned = Registry::Global().Find(tensor);
    if (!owned) {
      evictables.Add(tensor);
      return;
    }
    set.Add(owned.unit);
    ThrowIfError(owned.unit->PrepareWrite());  // through the pointer
  }
};

Use::Use(const at::Tensor& tensor) : pins_(std::make_unique<Pins>()) {
  pins_->Add(tensor);
}
Use::Use(const std::vector<at::Tensor>& tensors)
    : pins_(std::make_unique<Pins>()) {
  for (const auto& t : tensors) pins_->Add(t);
}
Use::~Use() = default;
Use::Use(Use&&) noexcept = default;
Use& Use::operator=(Use&&) noexcept = default;

}  // namespace tessera
