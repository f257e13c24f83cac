#include "sharding/flat/whole_values.h"

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "base/torch/torch_scope.h"

namespace tessera {

absl::StatusOr<FlatBuffer> GatherWhole(const FlatDescription& flat,
                                       const at::Tensor& owned,
                                       absl::string_view what) {
  TorchScope scope;
  TESSERA_ASSIGN_OR_RETURN(
      FlatBuffer whole,
      FlatBuffer::Allocate(flat.layout().whole_numel(), owned.scalar_type(),
                           flat.device(), MemoryKind::kWorking, Fill::kNone));
  whole.View(flat.owned()).copy_(owned);
  if (flat.stage().sharded_optimizer) {
    TESSERA_RETURN_IF_ERROR(
        flat.communicator()
            ->AllGather(whole.Bytes(flat.owned()), whole.Bytes(),
                        CommTag{absl::StrCat(what, " of unit ", flat.name())})
            .Wait());
  }
  return whole;
}

at::Tensor PlaceIn(const FlatBuffer& buffer, const FlatDescription& flat,
                   int parameter) {
  const FlatDescription::Parameter& p =
      flat.parameters()[static_cast<size_t>(parameter)];
  const at::ScalarType dtype = p.tensor.is_complex()
                                   ? c10::toComplexType(buffer.dtype())
                                   : buffer.dtype();
  return TensorOver(buffer.data(p.range.begin), p.tensor.sizes(),
                    p.tensor.strides(), dtype, flat.device());
}

absl::Status WriteOwned(const FlatDescription& flat, int parameter,
                        const at::Tensor& value, at::Tensor owned) {
  TorchScope scope;
  const FlatDescription::Parameter& p =
      flat.parameters()[static_cast<size_t>(parameter)];
  const Range mine = Intersect(p.range, flat.owned());
  if (mine.empty()) return absl::OkStatus();
  // In the order in which its elements lie in memory.
  TESSERA_ASSIGN_OR_RETURN(
      FlatBuffer dense,
      FlatBuffer::Allocate(p.range.numel(), owned.scalar_type(), flat.device(),
                           MemoryKind::kWorking));
  const at::ScalarType dtype =
      p.tensor.is_complex() ? c10::toComplexType(dense.dtype()) : dense.dtype();
  TensorOver(dense.data(0), p.tensor.sizes(), p.tensor.strides(), dtype,
             flat.device())
      .copy_(value);
  owned.narrow(0, mine.begin - flat.owned().begin, mine.numel())
      .copy_(
          dense.View({mine.begin - p.range.begin, mine.end - p.range.begin}));
  return absl::OkStatus();
}

}  // namespace tessera
