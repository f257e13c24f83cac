#include "sharding/whole_values.h"

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "sharding/torch_scope.h"

namespace tessera {

absl::StatusOr<FlatBuffer> GatherWhole(const Unit& unit,
                                       const at::Tensor& owned,
                                       absl::string_view what) {
  TorchScope scope;
  TESSERA_ASSIGN_OR_RETURN(
      FlatBuffer whole,
      FlatBuffer::Allocate(unit.layout().whole_numel(), owned.scalar_type(),
                           unit.device(), MemoryKind::kWorking));
  whole.View(unit.owned()).copy_(owned);
  if (unit.stage().sharded_optimizer) {
    TESSERA_RETURN_IF_ERROR(
        unit.communicator()
            ->AllGather(whole.Bytes(unit.owned()), whole.Bytes(),
                        CommTag{absl::StrCat(what, " of unit ", unit.name())})
            .Wait());
  }
  return whole;
}

at::Tensor PlaceIn(const FlatBuffer& flat, const Unit& unit, int parameter) {
  const Unit::Parameter& p = unit.parameters()[static_cast<size_t>(parameter)];
  const at::ScalarType dtype =
      p.tensor.is_complex() ? c10::toComplexType(flat.dtype()) : flat.dtype();
  return TensorOver(flat.data(p.flat.begin), p.tensor.sizes(),
                    p.tensor.strides(), dtype, unit.device());
}

absl::Status WriteOwned(const Unit& unit, int parameter,
                        const at::Tensor& value, at::Tensor owned) {
  TorchScope scope;
  const Unit::Parameter& p = unit.parameters()[static_cast<size_t>(parameter)];
  const Range mine = Intersect(p.flat, unit.owned());
  if (mine.empty()) return absl::OkStatus();
  // In the order in which its elements lie in memory.
  TESSERA_ASSIGN_OR_RETURN(
      FlatBuffer dense,
      FlatBuffer::Allocate(p.flat.numel(), owned.scalar_type(), unit.device(),
                           MemoryKind::kWorking));
  const at::ScalarType dtype =
      p.tensor.is_complex() ? c10::toComplexType(dense.dtype()) : dense.dtype();
  TensorOver(dense.data(0), p.tensor.sizes(), p.tensor.strides(), dtype,
             unit.device())
      .copy_(value);
  owned.narrow(0, mine.begin - unit.owned().begin, mine.numel())
      .copy_(dense.View({mine.begin - p.flat.begin, mine.end - p.flat.begin}));
  return absl::OkStatus();
}

}  // namespace tessera
