// Why a new storage is never accepted: gathers, gradients and the optimizer
// work on the storages that were taken over at Create. A parameter that pointed
// elsewhere would be read by forward and never be trained, without any error.
// As a write of the values it has the effect that the caller wants: torch::load
// loads, set_data sets. What cannot be such a write (another dtype, device or
// shape) is an error before anything has changed.
#include "sharding/dispatch/rebind.h"

#include <sstream>

#include "absl/strings/str_cat.h"
#include "base/torch/storage_access.h"
#include "base/torch/torch_scope.h"
#include "base/torch_guard.h"
#include "c10/core/StorageImpl.h"
#include "sharding/flat/flat_parameter.h"
#include "sharding/flat/pins.h"
#include "sharding/flat/registry.h"
#include "torch/csrc/autograd/variable.h"

namespace tessera {
namespace {

std::string Describe(const at::Tensor& t) {
  std::ostringstream out;
  out << t.scalar_type() << t.sizes() << " on " << t.device();
  return out.str();
}

[[noreturn]] void Refuse(const StorageOwner& owned, const at::Tensor& parameter,
                         const at::Tensor& source) {
  ThrowIfError(absl::InvalidArgumentError(absl::StrCat(
      "[", owned.flat->name(), "] the storage of parameter '",
      owned.parameter(), "' cannot be replaced while an engine owns it: it is ",
      Describe(parameter), ", the new one ", Describe(source),
      ". Convert the module (to(dtype), to(device), resize) before "
      "Engine::Create, or after Close().")));
  abort();  // not reached
}

bool Compatible(const at::Tensor& a, const at::Tensor& b) {
  return a.scalar_type() == b.scalar_type() && a.device() == b.device() &&
         a.sizes() == b.sizes() && a.layout() == b.layout();
}

// Writes source's values into the parameter. The caller does so on all ranks.
void CopyIn(const StorageOwner& owned, const at::Tensor& parameter,
            const at::Tensor& source) {
  PinSet pins;
  pins.Add(owned.flat);
  StorageOwner from = Registry::Global().Find(source);
  if (from) pins.Add(from.flat);
  ThrowIfError(owned.flat->PrepareWrite());
  TorchScope scope;
  parameter.copy_(source);
  torch::autograd::impl::bump_version(parameter);
}

}  // namespace

bool SetBecomesWrite(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const size_t n = schema.arguments().size();
  const at::Tensor self = torch::jit::peek(*stack, 0, n).toTensor();
  StorageOwner owned = Registry::Global().Find(self);
  if (!owned) return false;
  at::Tensor source;
  if (schema.overload_name() == "source_Tensor") {
    source = torch::jit::peek(*stack, 1, n).toTensor();
  }
  if (!source.defined() || !Compatible(self, source)) {
    Refuse(owned, self, source.defined() ? source : self);
  }
  CopyIn(owned, self, source);
  torch::jit::drop(*stack, n);
  torch::jit::push(*stack, self);
  return true;
}

void SetDataBecomesWrite(torch::jit::Stack* stack) {
  const at::Tensor self = torch::jit::peek(*stack, 0, 2).toTensor();
  const at::Tensor from = torch::jit::peek(*stack, 1, 2).toTensor();
  StorageOwner owned = Registry::Global().Find(self);
  if (!owned) return;
  if (from.has_storage() && from.storage().unsafeGetStorageImpl() ==
                                self.storage().unsafeGetStorageImpl()) {
    if (Compatible(self, from)) return;  // the same memory: nothing changes
    Refuse(owned, self, from);
  }
  if (!Compatible(self, from)) Refuse(owned, self, from);
  CopyIn(owned, self, from);
  // As after plain set_data, `from` and the parameter are one memory.
  c10::TensorImpl* impl = from.unsafeGetTensorImpl();
  impl->set_allow_tensor_metadata_change(true);  // `from` is often a .data()
  impl->set_storage_keep_dtype(self.storage());
  impl->set_sizes_and_strides(self.sizes(), self.strides(),
                              self.storage_offset());
  AddTag(from);
}

}  // namespace tessera
