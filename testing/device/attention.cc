// scaled_dot_product_attention asks each device which of its implementations to
// use: here the CPU's, over the same memory.
#include "ATen/native/transformers/attention.h"

#include "ATen/native/DispatchStub.h"
#include "ATen/ops/_fused_sdp_choice.h"
#include "testing/device/host_tensors.h"

namespace at::native {
namespace {

int64_t ChoiceOfCpu(const Tensor& query, const Tensor& key, const Tensor& value,
                    const std::optional<Tensor>& mask, double dropout,
                    bool is_causal, std::optional<double> scale,
                    bool enable_gqa) {
  testdevice::HostTensors host(testdevice::HostTensors::Memory::kOver);
  const auto of = [&](const Tensor& t) {
    return testdevice::IsOfDevice(t) ? host.Of(t) : t;
  };
  std::optional<Tensor> of_mask;
  if (mask.has_value() && mask->defined()) of_mask = of(*mask);
  return at::_fused_sdp_choice(of(query), of(key), of(value), of_mask, dropout,
                               is_causal, scale, enable_gqa);
}

REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &ChoiceOfCpu)

}  // namespace
}  // namespace at::native
