// States of 8 bits, in blocks of 64 elements:
//
//   | 64 codes, a byte each | float32 scale |     68 bytes
//
// The scale is a power of two: the exponent of the largest magnitude of the
// block (2^-95 at least, so that no number of a code is subnormal). A code is
// the element over it in 4 bits of mantissa, the leading one not stored. A step
// rounds elements stochastically (element_step.h), before the largest one's
// exponent is taken: to the nearest a moment that decays by 0.999 would stand
// still.
//
//   non-negative   eeeeemmm    9/8 * 2^-31 .. 15/8; less is the first, and
//                              elements below 2^-133 are 0
//   signed        seeeemmm     9/8 * 2^-15 .. 15/8; less is 0
//
// So an element has a relative error below 2^-3, or is below 9/8 * 2^-15 of the
// scale. A second moment does not become 0 where it is not next to nothing,
// since it divides; its range in powers of two is twice that of the first, as
// it is of squares. A block with an infinity, a NaN, or what is rounded to
// 2^128 is all NaN: the codes of 1, and NaN as the scale. Zero bytes are zeros.
//
// Blocks begin at multiples of 64 elements of a storage, and ranks own whole
// blocks (base/layout/layout.h), so they are the same at every world size.
//
// Source of the method: Dettmers et al., "8-bit Optimizers via Block-wise
// Quantization", 2022; of floating-point codes relative to a block: Peng et
// al., "FP8-LM", 2023.
#ifndef OPTIM_KERNELS_BLOCK8_H_
#define OPTIM_KERNELS_BLOCK8_H_

#include <cstdint>

namespace tessera {

inline constexpr int kBlock8Elements = 64;
inline constexpr int64_t kBlock8Bytes = 68;
inline constexpr uint32_t kBlock8LeastScale = 0x10000000;  // bits of 2^-95

// `numel` elements, from the first of a block on, as float32, and back, to the
// nearest, half away from zero: what
// was decoded is encoded to the bytes that it came from (but zero bytes to
// codes of 0 and the least scale, which is the same). Of the last block
// encoded, what is behind the elements becomes 0. Of non-negative ones the sign
// is left out. LOCAL.
void DecodeBlock8(const void* blocks, int64_t numel, bool non_negative,
                  float* elements);
void EncodeBlock8(const float* elements, int64_t numel, bool non_negative,
                  void* blocks);

}  // namespace tessera
#endif  // OPTIM_KERNELS_BLOCK8_H_
