// The mode's key is the one for which libtorch has no code of its own
// (examples/lora/lora.h); a program may use it once.
#include "benchmarks/gpt/made_on_device.h"

#include <optional>

#include "ATen/Functions.h"
#include "torch/library.h"

namespace tessera {
namespace {

constexpr auto kMode = c10::DispatchKey::TESTING_ONLY_GenericMode;
thread_local c10::Device made_on = c10::kCPU;

at::Tensor Empty(c10::SymIntArrayRef sizes, std::optional<at::ScalarType> dtype,
                 std::optional<at::Layout> layout,
                 std::optional<at::Device> device, std::optional<bool> pinned,
                 std::optional<at::MemoryFormat> format) {
  const c10::impl::ExcludeDispatchKeyGuard below(kMode);
  return at::empty_symint(sizes, dtype, layout, device.value_or(made_on),
                          pinned, format);
}

// All other operators pass through.
TORCH_LIBRARY_IMPL(_, TESTING_ONLY_GenericMode, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(aten, TESTING_ONLY_GenericMode, m) {
  m.impl("empty.memory_format", &Empty);
}

}  // namespace

MadeOnDevice::MadeOnDevice(c10::Device device) : mode_(kMode) {
  made_on = device;
}

}  // namespace tessera
