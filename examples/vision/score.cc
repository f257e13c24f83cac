#include "examples/vision/score.h"

#include "torch/nn/functional/loss.h"
#include "torch/nn/options/loss.h"

void Score::Add(const at::Tensor& logits, const at::Tensor& labels) {
  namespace F = torch::nn::functional;
  loss.Add(
      F::cross_entropy(logits.detach().to(at::kFloat), labels,
                       F::CrossEntropyFuncOptions().reduction(torch::kNone)));
  accuracy.Add(logits, labels);
}
