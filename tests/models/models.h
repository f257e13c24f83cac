// Models are small modules, each with one way of using its parameters that an
// engine below the dispatcher can get wrong. Sizes are odd, so that shards cut
// through parameters.
//
// A model makes its own micro-batches, from rank and number alone, with a
// generator of its own; the default generator serves dropout.
#ifndef TESTS_MODELS_MODELS_H_
#define TESTS_MODELS_MODELS_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "torch/nn/module.h"

namespace tessera {

class TestModel : public torch::nn::Module {
 public:
  using torch::nn::Module::Module;
  // Runs a forward of a rank's micro-batch, with gradients; returns a float32
  // scalar.
  virtual at::Tensor Loss(int rank, int64_t micro_batch) = 0;
  // Returns the dtype of the first real floating parameter; the model casts its
  // inputs to it.
  at::ScalarType dtype() const;
  // Whether a rank that has parts of parameters takes parts of inputs, too.
  // With copies of parameters it always does.
  bool divides_inputs = false;
};

// Makes a model by its name:
//   Mlp             blocks of Linear and LayerNorm; one layer is never used
//   Gpt             two blocks, dropout; the head is the embedding's .t()
//   Lstm            two layers, bidirectional, dropout between them
//   Attention       MultiheadAttention, TransformerEncoderLayer, dropout
//   ConvNorm        channels_last convolution, BatchNorm (buffers), GroupNorm
//   Views           chunk, view, slice, expand, index of weights
//   SharedStorage   parameters that lie at odd places of one storage
//   Tied            a parameter that two modules have, under two names
//   Clamped         parameters written before each forward, their values kept
//   UsedTwice       a layer applied twice in one forward
//   TwoForwards     two forwards and one without gradients before one backward
//   Frozen          layers that require no gradient, between some that do
//   Thawed          as Frozen, until the second micro-batch
//   NeverTrained    parameters registered without a gradient, also of integers
//                   and booleans, in a ParameterList and a ParameterDict
//   Embedding       padding_idx, sparse = false, and a table read twice
//   SparseEmbedding sparse = true
//   OneRank         a layer whose output enters the loss of rank 1 alone
//   ChangingRank    as OneRank, with another rank at each micro-batch, and a
//                   layer that no rank uses at first
//   OneRankForward  a layer that only rank 1 runs at all (not for stage 3)
//   LargeNorm       gradients far above a norm of 1 at even micro-batches, far
//                   below at odd ones
//   Overflows       a loss that overflows float16 at micro-batch 1 of rank 0,
//                   one element of a gradient at 4 and 5 of rank 1
//   Recomputing     blocks computed again in backward (a reentrant checkpoint),
//                   one of them twice
//   Checkpointing   recomputed by tessera::Checkpointed, one within another,
//                   with dropout and a buffer that counts
//   GradientPenalty autograd::grad of inputs and of a weight, part of the loss
//   Evaluating      forwards without gradients between micro-batches, by
//                   another path
//   ChangingPath    blocks that micro-batches use in different orders
//   Wandering       blocks in an order and number of every rank's own, others
//                   at each micro-batch (not for stage 3 with collective
//                   gathers)
//   MixedDtype      float64 parameters among float32 ones
//   Complex         complex64 parameters among float32 ones
//
// These are architectures of the field (zoo_test.cc), not in TestModelNames:
//   Resnet, Seq2Seq, Unet, Lora, PackedGru, Vit, Autoencoder
//   Experts         a mixture of which each rank runs other experts (not for
//                   stage 3 with collective gathers)
//   GraphNet        neighbours summed by a sparse matrix
//   ChunkedLoss     tessera::LinearCrossEntropy, with ranks' own numbers of
//                   tokens
//
// All except these run in bfloat16 and float16 too; ConvNorm only if its norms'
// parameters stay in float32, or its buffers do not. "Divided:<name>" is one
// that divides_inputs.
std::shared_ptr<TestModel> MakeTestModel(absl::string_view name);
std::vector<std::string> TestModelNames();
// Returns the names of those of which all ranks run the same operators.
std::vector<std::string> TestModelNamesForStage3();

}  // namespace tessera
#endif  // TESTS_MODELS_MODELS_H_
