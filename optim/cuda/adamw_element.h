// AdamWUpdate (optim/adamw_kernel.h) of one element, with its bits, as
// functions that CPU and GPU share.
#ifndef OPTIM_CUDA_ADAMW_ELEMENT_H_
#define OPTIM_CUDA_ADAMW_ELEMENT_H_

#include <cstdint>

#include "optim/adamw_kernel.h"
#include "optim/cuda/arithmetic.h"

namespace tessera {

// What one launch has in common. The factor may come later, from a device.
struct AdamWConstants {
  explicit AdamWConstants(const AdamWCoefficients& c)
      : c(c), from_gradient(!(c.exp_avg_weight < 0.5f)) {
    // As a lerp does it: from the nearer end.
    weight = from_gradient ? c.exp_avg_weight - 1 : c.exp_avg_weight;
  }
  AdamWCoefficients c;
  bool from_gradient;
  float weight;
};

struct AdamWElement {
  float master, exp_avg, exp_avg_sq;
};

TESSERA_HOST_DEVICE inline AdamWElement AdamWStep(const AdamWElement& before,
                                                  float gradient,
                                                  const AdamWConstants& k) {
  const AdamWCoefficients& c = k.c;
  const float g = Times(gradient, c.gradient_factor);
  AdamWElement after;
  after.exp_avg = OneNan(MultiplyAdd(k.weight, Minus(g, before.exp_avg),
                                     k.from_gradient ? g : before.exp_avg));
  after.exp_avg_sq = OneNan(MultiplyAdd(g, Times(g, c.exp_avg_sq_weight),
                                        Times(before.exp_avg_sq, c.beta2)));
  const float denominator =
      Plus(Over(SquareRoot(after.exp_avg_sq), c.bias_correction2_sqrt), c.eps);
  after.master =
      OneNan(Plus(Times(before.master, c.decay),
                  Over(Times(c.minus_step_size, after.exp_avg), denominator)));
  return after;
}

// ---- working copies: x to nearest even, as bits

TESSERA_HOST_DEVICE inline uint16_t BFloat16BitsOf(float x) {
  const uint32_t bits = BitCast<uint32_t>(x);
  const uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  return static_cast<uint16_t>(x == x ? rounded : 0xffff);
}

TESSERA_HOST_DEVICE inline uint16_t Float16BitsOf(float x) {
  const uint32_t bits = BitCast<uint32_t>(x);
  const uint32_t rest = bits & 0x7fffffff;
  const uint32_t sign = bits >> 16 & 0x8000;
  uint32_t half = (rest + 0xfff + (rest >> 13 & 1) - 0x38000000) >> 13;
  // Subnormal: adding 0.5 makes the sum's last bit that of the smallest one.
  if (rest < 0x38800000) {
    half = BitCast<uint32_t>(Plus(BitCast<float>(rest), 0.5f)) - 0x3f000000;
  }
  if (rest >= 0x477ff000) half = 0x7c00;
  if (rest > 0x7f800000) half = 0x7e00;
  return static_cast<uint16_t>(half | sign);
}

}  // namespace tessera
#endif  // OPTIM_CUDA_ADAMW_ELEMENT_H_
