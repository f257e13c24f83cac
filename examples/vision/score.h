// Loss and accuracy of a classifier over ranks.
#ifndef EXAMPLES_VISION_SCORE_H_
#define EXAMPLES_VISION_SCORE_H_

#include <vector>

#include "ATen/core/Tensor.h"
#include "tessera/tessera.h"

struct Score {
  // Adds `logits` [B, classes] and `labels` [B] of int64. Does not wait for the
  // device. LOCAL.
  void Add(const at::Tensor& logits, const at::Tensor& labels);
  std::vector<tessera::Metric*> metrics() { return {&loss, &accuracy}; }

  tessera::Mean loss{"loss"};  // cross entropy
  tessera::Accuracy accuracy;
};

#endif  // EXAMPLES_VISION_SCORE_H_
