// PlainCasts does in plain training the casts that an engine makes of inputs
// (docs/design.md, "Casts of inputs"), implemented independently: plain
// libtorch refuses to combine float32 inputs, or running statistics, with
// parameters of 16 bits.
//
//   linear, convolutions, RNNs, ...   floating arguments that are no parameters
//                                     become the parameters' dtype
//   normalisations                    all floating arguments become the running
//                                     statistics' dtype, or else the
//                                     parameters'; the result the narrower one
//                                     of the input's and the parameters'
//
// It casts nothing where the operator's parameters differ in dtype, and neither
// what an operator writes, nor running statistics, nor what autocast handles.
#ifndef VERIFY_PLAIN_PLAIN_CASTS_H_
#define VERIFY_PLAIN_PLAIN_CASTS_H_

#include <vector>

#include "ATen/core/Tensor.h"

namespace tessera {

// While it lives, operators of this thread (and of backwards that it starts)
// cast. `parameters` are those whose dtype counts, including their views; they
// live longer. Do not nest it.
class PlainCasts {
 public:
  explicit PlainCasts(const std::vector<at::Tensor>& parameters);
  ~PlainCasts();
  PlainCasts(const PlainCasts&) = delete;
  PlainCasts& operator=(const PlainCasts&) = delete;
};

}  // namespace tessera
#endif  // VERIFY_PLAIN_PLAIN_CASTS_H_
