// Implements operators of memory: those that allocate, those that make views,
// and copies between host and devices. They wait where CUDA's do.
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "ATen/EmptyTensor.h"
#include "ATen/TensorOperators.h"
#include "ATen/core/LegacyTypeDispatch.h"
#include "ATen/core/Tensor.h"
#include "ATen/native/Resize.h"
#include "ATen/ops/_local_scalar_dense_native.h"
#include "ATen/ops/_reshape_alias_native.h"
#include "ATen/ops/as_strided_native.h"
#include "ATen/ops/copy_native.h"
#include "ATen/ops/empty.h"
#include "ATen/ops/empty_like.h"
#include "ATen/ops/ones_like.h"
#include "ATen/ops/view_native.h"
#include "absl/strings/str_cat.h"
#include "c10/core/DeviceGuard.h"
#include "c10/core/Event.h"
#include "testing/device/host_tensors.h"
#include "testing/device/runtime.h"
#include "testing/device/torch_parts.h"
#include "torch/library.h"

namespace testdevice {
namespace {

constexpr c10::DispatchKeySet kKey(c10::DispatchKey::PrivateUse1);

c10::DeviceGuard GuardOf(std::optional<c10::Device> device) {
  const c10::Device of = device.value_or(TestDevice(-1));
  return c10::DeviceGuard(
      of.has_index() ? of : TestDevice(Runtime::Get().current_device()));
}

at::Tensor Empty(c10::SymIntArrayRef sizes, std::optional<at::ScalarType> dtype,
                 std::optional<at::Layout>, std::optional<c10::Device> device,
                 std::optional<bool>,
                 std::optional<at::MemoryFormat> memory_format) {
  const auto guard = GuardOf(device);
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(sizes),
                                   GetAllocator(), kKey,
                                   at::dtype_or_default(dtype), memory_format);
}

at::Tensor EmptyStrided(c10::SymIntArrayRef sizes, c10::SymIntArrayRef strides,
                        std::optional<at::ScalarType> dtype,
                        std::optional<at::Layout>,
                        std::optional<c10::Device> device,
                        std::optional<bool>) {
  const auto guard = GuardOf(device);
  return at::detail::empty_strided_generic(
      C10_AS_INTARRAYREF_SLOW(sizes), C10_AS_INTARRAYREF_SLOW(strides),
      GetAllocator(), kKey, at::dtype_or_default(dtype));
}

at::Tensor AsStrided(const at::Tensor& self, c10::SymIntArrayRef sizes,
                     c10::SymIntArrayRef strides,
                     std::optional<c10::SymInt> offset) {
  std::optional<int64_t> at;
  if (offset.has_value()) at = offset->expect_int();
  return at::native::as_strided_tensorimpl(self, C10_AS_INTARRAYREF_SLOW(sizes),
                                           C10_AS_INTARRAYREF_SLOW(strides),
                                           at);
}

at::Tensor View(const at::Tensor& self, c10::SymIntArrayRef sizes) {
  return at::native::view(self, C10_AS_INTARRAYREF_SLOW(sizes));
}

at::Tensor ReshapeAlias(const at::Tensor& self, c10::SymIntArrayRef sizes,
                        c10::SymIntArrayRef strides) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(sizes),
                                    C10_AS_INTARRAYREF_SLOW(strides));
}

// Resizes the tensor; a larger size moves the contents to new memory.
const at::Tensor& Resize(const at::Tensor& self, c10::SymIntArrayRef sizes,
                         std::optional<at::MemoryFormat> memory_format) {
  const auto guard = GuardOf(self.device());
  c10::TensorImpl* const impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(C10_AS_INTARRAYREF_SLOW(sizes));
  if (memory_format.has_value() &&
      *memory_format != at::MemoryFormat::Preserve) {
    impl->empty_tensor_restride(*memory_format);
  }
  const size_t bytes = at::detail::computeStorageNbytes(
      self.sizes(), self.strides(), self.element_size(),
      static_cast<size_t>(self.storage_offset()));
  const c10::Storage& storage = self.storage();
  if (bytes <= storage.nbytes()) return self;
  c10::DataPtr grown = GetAllocator()->allocate(bytes);
  if (storage.nbytes() > 0) {
    GetAllocator()->copy_data(grown.get(), storage.data(), storage.nbytes());
  }
  storage.set_data_ptr_noswap(std::move(grown));
  storage.set_nbytes(bytes);
  return self;
}

at::Tensor& SetStorageStrided(at::Tensor& self, c10::Storage source,
                              c10::SymInt offset, c10::SymIntArrayRef sizes,
                              c10::SymIntArrayRef strides) {
  c10::TensorImpl* const impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  if (strides.empty()) {
    impl->set_sizes_contiguous(C10_AS_INTARRAYREF_SLOW(sizes));
    impl->set_storage_offset(offset.expect_int());
  } else {
    impl->set_sizes_and_strides(C10_AS_INTARRAYREF_SLOW(sizes),
                                C10_AS_INTARRAYREF_SLOW(strides),
                                offset.expect_int());
  }
  return self;
}

at::Tensor& SetStorage(at::Tensor& self, c10::Storage source) {
  const auto numel =
      static_cast<int64_t>(source.nbytes() / self.element_size());
  return SetStorageStrided(self, std::move(source), 0, c10::SymInt(numel), {});
}

at::Tensor& SetTensor(at::Tensor& self, const at::Tensor& source) {
  return SetStorageStrided(self, source.storage(), source.sym_storage_offset(),
                           source.sym_sizes(), source.sym_strides());
}

at::Tensor& SetNothing(at::Tensor& self) {
  return SetStorageStrided(
      self,
      c10::Storage(c10::Storage::use_byte_size_t(), 0,
                   GetAllocator()->allocate(0), GetAllocator(), true),
      0, c10::SymInt(0), {});
}

// ---- copies

// Copies on `stream`, whose task it is.
void CopyOn(c10::Stream stream, const at::Tensor& from, const at::Tensor& to,
            const std::string& what) {
  HostTensors host(HostTensors::Memory::kOver);
  const at::Tensor source = IsOfDevice(from) ? host.Of(from) : from;
  const at::Tensor target = IsOfDevice(to) ? host.Of(to) : to;
  std::vector<Access> accesses;
  if (IsOfDevice(from) || from.is_pinned()) {
    accesses.push_back(AccessTo(from, false, 0));
  }
  if (IsOfDevice(to) || to.is_pinned()) {
    accesses.push_back(AccessTo(to, true, 1));
  }
  Runtime::Get().Launch(
      stream, what, accesses,
      [&](int argument) {
        return absl::StrCat(argument == 0 ? "its source " : "its target ",
                            TextOf(argument == 0 ? from : to));
      },
      [source, target] {
        const at::AutoDispatchBelowADInplaceOrView below;
        at::native::copy_(const_cast<at::Tensor&>(target), source);
      });
}

// Copies between two devices, on the source's stream, after the target's
// earlier work and before its later work.
void CopyBetween(const at::Tensor& from, const at::Tensor& to) {
  Runtime& runtime = Runtime::Get();
  const c10::Stream stream = runtime.Current(from.device().index());
  const c10::Stream of_target = runtime.Current(to.device().index());
  runtime.Block(*runtime.Record(of_target), stream);
  // It writes to the other device, so it is two tasks over a buffer.
  const at::Tensor between =
      at::empty_like(from, from.options().device(at::kCPU));
  CopyOn(stream, from, between, "aten::copy_ to another device");
  runtime.Block(*runtime.Record(stream), of_target);
  CopyOn(of_target, between, to, "aten::copy_ from another device");
}

at::Tensor CopyFrom(const at::Tensor& from, const at::Tensor& to,
                    bool non_blocking) {
  Runtime& runtime = Runtime::Get();
  if (IsOfDevice(from) && IsOfDevice(to)) {
    if (from.device() == to.device()) {
      const auto guard = GuardOf(to.device());
      CopyOn(runtime.Current(to.device().index()), from, to, "aten::copy_");
    } else {
      CopyBetween(from, to);
    }
    return to;
  }
  const at::Tensor& of_host = IsOfDevice(from) ? to : from;
  const at::Tensor& of_device = IsOfDevice(from) ? from : to;
  const c10::Stream stream = runtime.Current(of_device.device().index());
  const char* const what = IsOfDevice(from) ? "aten::copy_ to the host"
                                            : "aten::copy_ to the device";
  if (!non_blocking || !of_host.is_pinned()) {
    CopyOn(stream, from, to, what);
    runtime.HostWait(stream, absl::StrCat("blocking ", what));
  } else {
    CopyOn(stream, from, to, what);
  }
  return to;
}

at::Tensor CopyFromAndResize(const at::Tensor& from, const at::Tensor& to) {
  at::native::resize_output(to, from.sizes());
  return CopyFrom(from, to, /*non_blocking=*/false);
}

at::Scalar LocalScalarDense(const at::Tensor& self) {
  const at::Tensor value =
      at::empty(self.sizes(), self.options().device(at::kCPU));
  const c10::Stream stream = Runtime::Get().Current(self.device().index());
  CopyOn(stream, self, value, "aten::_local_scalar_dense");
  Runtime::Get().HostWait(stream, "item");
  return at::native::_local_scalar_dense_cpu(value);
}

// Dropout has a fused implementation on devices, which rounds differently; this
// is the CPU's, whose noise is the mask.
std::tuple<at::Tensor, at::Tensor> NativeDropout(const at::Tensor& self,
                                                 double p,
                                                 std::optional<bool> train) {
  if (!train.value_or(true)) return {self.clone(), at::ones_like(self)};
  at::Tensor noise = at::empty_like(self);
  noise.bernoulli_(1 - p).div_(1 - p);
  return {self * noise, noise};
}

at::Tensor NativeDropoutBackward(const at::Tensor& gradient,
                                 const at::Tensor& mask, double) {
  return gradient * mask;
}

// Module::to uses this to move a parameter to a device.
bool HasCompatibleShallowCopyType(const at::Tensor& self,
                                  const at::Tensor& from) {
  return self.layout() == at::kStrided && from.layout() == at::kStrided;
}

void RecordStream(at::Tensor& self, c10::Stream stream) {
  GetAllocator()->recordStream(self.storage().data_ptr(), stream);
}

}  // namespace

void RegisterOperators() {
  static auto* const library =
      new torch::Library(torch::Library::IMPL, "aten",
                         c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  library->impl("empty.memory_format", &Empty);
  library->impl("empty_strided", &EmptyStrided);
  library->impl("as_strided", &AsStrided);
  library->impl("view", &View);
  library->impl("_reshape_alias", &ReshapeAlias);
  library->impl("resize_", &Resize);
  library->impl("set_.source_Storage", &SetStorage);
  library->impl("set_.source_Storage_storage_offset", &SetStorageStrided);
  library->impl("set_.source_Tensor", &SetTensor);
  library->impl("set_", &SetNothing);
  library->impl("_copy_from", &CopyFrom);
  library->impl("_copy_from_and_resize", &CopyFromAndResize);
  library->impl("_local_scalar_dense", &LocalScalarDense);
  library->impl("record_stream", &RecordStream);
  library->impl("native_dropout", &NativeDropout);
  library->impl("native_dropout_backward", &NativeDropoutBackward);
  library->impl("_has_compatible_shallow_copy_type",
                &HasCompatibleShallowCopyType);
}

}  // namespace testdevice
