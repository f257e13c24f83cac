#include "optim/state_numbers.h"

#include "ATen/ops/empty.h"
#include "optim/kernels/block8.h"

namespace tessera {

at::Tensor NumbersOf(const at::Tensor& kept, int64_t numel, bool non_negative) {
  if (kept.scalar_type() != at::kByte) return kept.narrow(0, 0, numel);
  const at::Tensor blocks = kept.cpu();
  const at::Tensor numbers = at::empty({numel}, at::kFloat);
  DecodeBlock8(blocks.const_data_ptr(), numel, non_negative,
               numbers.mutable_data_ptr<float>());
  return numbers.to(kept.device());
}

void SetNumbers(const at::Tensor& numbers, bool non_negative,
                const at::Tensor& kept) {
  if (kept.scalar_type() != at::kByte) {
    kept.copy_(numbers);
    return;
  }
  const at::Tensor floats = numbers.to(at::kCPU, at::kFloat).contiguous();
  const at::Tensor blocks =
      kept.is_cpu() ? kept : at::empty(kept.sizes(), at::kByte);
  EncodeBlock8(floats.const_data_ptr<float>(), floats.numel(), non_negative,
               blocks.mutable_data_ptr());
  if (!kept.is_cpu()) kept.copy_(blocks);
}

}  // namespace tessera
