// AdamWUpdate: one AdamW step of a range of float32 masters on the CPU, in one
// pass over memory, with a working copy of them written on the way.
//
//   g           gradient * factor
//   exp_avg     lerp(exp_avg, g, 1 - beta1), one FMA
//   exp_avg_sq  fma(g, g * (1 - beta2), exp_avg_sq * beta2)
//   master      master * (1 - lr * weight_decay)
//               + -(lr / (1 - beta1^step)) * exp_avg
//               / (sqrt(exp_avg_sq) / sqrt(1 - beta2^step) + eps)
//   working     the master, rounded to nearest even
//
// Each operation but the FMAs is rounded to float32; coefficients are computed
// in float64 and rounded once. These are the operations of the vectorised body
// of libtorch's fused AdamW where it is compiled for AVX2, so the bits are
// those of torch.optim.AdamW(fused=True), except for elements that libtorch
// does in its scalar tail, which rounds otherwise (Note [Bits of AdamW]).
//
// Note [Bits of AdamW]
// An element's bits depend on that element's inputs alone: not on instruction
// set, threads, alignment, or where a range begins or ends. NaN is always
// written as 0x7fc00000 (which of two NaNs an addition returns is for the
// compiler to choose), in a working copy as what at::Tensor::copy_ makes of
// that: 0xffff in bfloat16, 0x7e00 in float16.
//
// Source: Loshchilov & Hutter, "Decoupled Weight Decay Regularization", 2019.
// Threads: none of its own; ranges that do not overlap may be done at once.
#ifndef OPTIM_ADAMW_KERNEL_H_
#define OPTIM_ADAMW_KERNEL_H_

#include <cstdint>

#include "base/isa.h"

namespace tessera {

struct AdamWOptions {
  double lr = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 0;
  // The bits of torch::optim::AdamW instead: class AdamW's affair
  // (optim/adamw.h), the kernel does not know it.
  bool libtorch_exact = false;

  friend bool operator==(const AdamWOptions& a, const AdamWOptions& b) {
    return a.lr == b.lr && a.beta1 == b.beta1 && a.beta2 == b.beta2 &&
           a.eps == b.eps && a.weight_decay == b.weight_decay &&
           a.libtorch_exact == b.libtorch_exact;
  }
};

// What the elements of one step have in common.
struct AdamWCoefficients {
  float decay = 1;              // of masters
  float exp_avg_weight = 0;     // of gradients in exp_avg
  float beta2 = 0;              // of exp_avg_sq
  float exp_avg_sq_weight = 0;  // of squared gradients in exp_avg_sq
  float bias_correction2_sqrt = 1;
  float eps = 0;
  float minus_step_size = 0;
  float gradient_factor = 1;  // 1 changes no gradient
};
// `step` counts from 1.
AdamWCoefficients CoefficientsOf(const AdamWOptions& options, int64_t step,
                                 double gradient_factor = 1);

enum class WorkingType { kNone, kFloat32, kBFloat16, kFloat16 };

struct AdamWRange {
  float* master = nullptr;
  float* exp_avg = nullptr;
  float* exp_avg_sq = nullptr;
  const float* gradient = nullptr;
  int64_t numel = 0;  // of each
  // Where new masters go while the old ones stay, apart from the rest; null:
  // they are changed in place. Of the CPU alone.
  float* new_master = nullptr;
  // Its elements' type, and memory for `numel` of them, apart from the rest.
  WorkingType working_type = WorkingType::kNone;
  void* working = nullptr;
};

// LOCAL. REQUIRES: the memory of `range` does not overlap.
void AdamWUpdate(const AdamWRange& range, const AdamWCoefficients& coefficients,
                 Isa isa = BestIsa());

// Elements [begin, end) of a range.
AdamWRange Part(const AdamWRange& range, int64_t begin, int64_t end);

}  // namespace tessera
#endif  // OPTIM_ADAMW_KERNEL_H_
