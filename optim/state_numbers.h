// The numbers that states of an optimizer are, out of what they are kept as and
// back, for who is no step: checkpoints, programs. Those of 8 bits
// (optim/kernels/block8.h) are bytes in blocks and float32 numbers; others are
// numbers as they are kept.
//
// All of it is on whatever device; what is there in blocks goes through the
// CPU, blocking. Throws c10::Error.
#ifndef OPTIM_STATE_NUMBERS_H_
#define OPTIM_STATE_NUMBERS_H_

#include <cstdint>

#include "ATen/core/Tensor.h"

namespace tessera {

// [numel], the first of `kept`, which begins with a block; not a copy where
// they are kept as numbers.
at::Tensor NumbersOf(const at::Tensor& kept, int64_t numel, bool non_negative);
// Of any floating dtype. In blocks what is behind them in the last one is 0.
void SetNumbers(const at::Tensor& numbers, bool non_negative,
                const at::Tensor& kept);

}  // namespace tessera
#endif  // OPTIM_STATE_NUMBERS_H_
