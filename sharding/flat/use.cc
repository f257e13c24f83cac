#include "sharding/flat/use.h"

#include "base/torch_guard.h"
#include "sharding/construct/construction.h"
#include "sharding/flat/pins.h"
#include "sharding/flat/registry.h"

namespace tessera {

struct Use::Pins {
  PinSet set;
  EvictablePins evictables;
  void Add(const at::Tensor& tensor) {
    StorageOwner owned = Registry::Global().Find(tensor);
    if (!owned) {
      evictables.Add(tensor);
      return;
    }
    set.Add(owned.flat);
    ThrowIfError(owned.flat->PrepareWrite());  // through the pointer
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
