// LinearCrossEntropy is the cross entropy of a linear layer's outputs, the last
// two operators of a language model, without the matrix of all logits:
//
//   loss = tessera::LinearCrossEntropy(hidden, head->weight, targets);
//
//   cross_entropy(at::linear(hidden, weight, bias).to(at::kFloat), targets)
//
// computes the same, but holds the logits [N, V] in the weight's dtype and in
// float32, their log-softmax and their gradient: of 16384 tokens and 128256
// words 8.4 GB for each float32 copy. Here one chunk of tokens after the other
// has its logits computed, its losses taken, and its logits turned into their
// own gradient in place, which at once adds to the gradients of hidden, weight
// and bias. So backward only multiplies these by the loss's gradient.
//
//   hidden   [..., D]  any float dtype; N tokens in all, cast to weight's dtype
//   weight   [V, D]    float32, bfloat16, float16 or float64
//   targets  [...]     int64, 0 to V - 1 or ignore_index; hidden's sizes
//                      except the last
//   result   []        float32; float64 for a float64 weight
//
// Under autocast hidden, weight and bias are cast to its dtype, as at::linear
// casts them. Any device that libtorch supports.
//
// Memory. From its call to the end of backward it holds the gradients: [N, D]
// in the weight's dtype and [V, D] in float32, where they are needed. During
// the call it also holds one chunk of logits in float32 and, for a weight of 16
// bits, the chunk in these and a product [V, D] (on the CPU in both dtypes).
// The weight is not saved for backward: an engine at stage 3 gathers it once,
// in forward.
//
// Numbers. Logits are rounded to the weight's dtype, as at::linear rounds them;
// all that follows is float32 (float64 for float64). With u the roundoff of
// float32, w that of the weight's dtype, R the largest distance of a token's
// logits from their maximum and dz the largest error of its logits, a token's
// loss differs from exact arithmetic by at most
//
//   2 dz + (V + 4 + 2 R) u
//
// and so does the plain loss. Before backward's product the gradient of a logit
// has a relative error of as much plus w; sums over tokens (of the weight) are
// made in float32, of products that are rounded to w once per chunk.
// tests/engine/linear_cross_entropy_test.cc has all bounds.
//
// Bits. They are the same in each run, on all ranks and at all ZeRO stages, and
// depend on `chunk`: the weight's gradient is a sum over chunks, and libtorch
// may choose the kernel of a product by its rows. No chunk size gives the bits
// of the plain loss.
//
// LOCAL; where the weight is an engine's it is gathered once per call, as for
// one operator. Do not call it in a part that activation checkpointing
// recomputes: it would compute its gradients twice, and saves nothing there.
//
// Errors are thrown as StatusException: InvalidArgument for shapes, dtypes or
// options that do not fit, and on the CPU for a target out of range (a device
// asserts, as in libtorch); Unimplemented for a gradient of a gradient.
//
// Source: the gradient in the forward pass is the method of Liger Kernel's
// fused linear cross entropy (Hsu et al., arXiv:2410.10989). Apple's Cut Cross
// Entropy (Wijmans et al., arXiv:2411.09009) recomputes the logits in
// backward instead.
#ifndef NN_LINEAR_CROSS_ENTROPY_H_
#define NN_LINEAR_CROSS_ENTROPY_H_

#include <cstdint>

#include "ATen/core/Tensor.h"

namespace tessera {

struct LinearCrossEntropyOptions {
  enum class Reduction {
    kMean,  // over the tokens whose target is not ignore_index; NaN if none is
    kSum,
  };

  at::Tensor bias;              // [V], weight's dtype; undefined: none
  int64_t ignore_index = -100;  // targets of tokens that do not count
  double label_smoothing = 0;   // 0 to 1, as torch's
  Reduction reduction = Reduction::kMean;
  // The tokens of a chunk. 0: LinearCrossEntropyChunk(V). More tokens take more
  // memory; fewer make smaller products, and more passes over the weight's
  // gradient.
  int64_t chunk = 0;
};

// See above. Gradients flow to hidden, weight and bias, where these require
// them; without, or under NoGradGuard, none are computed.
at::Tensor LinearCrossEntropy(const at::Tensor& hidden,
                              const at::Tensor& weight,
                              const at::Tensor& targets,
                              const LinearCrossEntropyOptions& options = {});

// Returns the default chunk for a vocabulary: as many tokens as have 2^25
// logits (128 MiB of float32), rounded down to a multiple of 256; at least 256.
int64_t LinearCrossEntropyChunk(int64_t vocabulary);

}  // namespace tessera
#endif  // NN_LINEAR_CROSS_ENTROPY_H_
