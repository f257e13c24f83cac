// Operators of copies (placed.h): each rank computes the same with its own, and
// the gradient of each is an addend, since backward is linear in gradients.
// What needs no gradient is an ordinary tensor.
#include <torch/torch.h>

#include <utility>
#include <vector>

#include "parallel/tensor/rules.h"

namespace tessera {
namespace {

bool IsCopy(const at::Tensor& tensor) {
  const Placed* const placed = PlacedOf(tensor);
  return placed != nullptr && placed->placement.kind == TensorPlacement::kCopy;
}

template <typename F>
void ForTensors(const c10::IValue& value, const F& f) {
  if (value.isTensor()) {
    f(value.toTensor());
  } else if (value.isTensorList() || value.isOptionalTensorList()) {
    for (const c10::IValue& each : value.toListRef()) ForTensors(each, f);
  }
}

// Whether only copies are placed, of which alone one is written; or a copy is
// written, whatever with.
bool IsOfCopies(PlacedCall& call, std::vector<at::Tensor>* written) {
  const auto& arguments = call.op().schema().arguments();
  bool all = true, writes_other = false;
  for (size_t i = 0; i < call.size(); ++i) {
    const c10::AliasInfo* const alias = arguments[i].alias_info();
    const bool writes = alias != nullptr && alias->isWrite();
    ForTensors(call[i], [&](const at::Tensor& t) {
      if (!t.defined()) return;
      all &= PlacedOf(t) == nullptr || IsCopy(t);
      if (!writes) return;
      writes_other |= !IsCopy(t);
      written->push_back(t);
    });
  }
  return !writes_other && (all || !written->empty());
}

}  // namespace

bool CopyRule(PlacedCall& call) {
  std::vector<at::Tensor> written;
  if (!IsOfCopies(call, &written)) return false;
  for (size_t i = 0; i < call.size(); ++i) {
    call[i] = WithTensorsOf(call[i], [&](const at::Tensor& t) {
      return t.defined() ? WholeForParts(t, call.group()) : t;
    });
  }
  call.Run();
  for (const at::Tensor& each : written) RenewHistory(each);
  for (size_t i = 0; i < call.op().schema().returns().size(); ++i) {
    call[i] = WithTensorsOf(call[i], [&](const at::Tensor& result) {
      for (const at::Tensor& each : written) {
        if (PlacedOf(each)->part.is_same(result)) return each;
      }
      return result.defined() && result.requires_grad()
                 ? call.Made(result, TensorPlacement::Copy())
                 : result;
    });
  }
  return true;
}

}  // namespace tessera
