// Holds what the oracle keeps of ranks and parameters.
#ifndef VERIFY_ORACLE_PARAMETER_H_
#define VERIFY_ORACLE_PARAMETER_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "ATen/core/Tensor.h"
#include "ATen/ops/view_as_real.h"
#include "parallel/tensor/placed.h"
#include "verify/oracle.h"
#include "verify/oracle_norm.h"

namespace tessera {

struct Oracle::Rank {
  std::vector<std::shared_ptr<torch::nn::Module>> modules;  // by part
  at::Tensor generator_state;
};

// One parameter, or one part of it, on all ranks; everything except the
// replicas is real.
struct Oracle::Parameter {
  std::string name;
  int part = 0;
  std::optional<TensorPlacement> cut;  // nullopt: it is whole
  bool complex = false;
  PlacedGradient place;              // in its storage at the start
  std::vector<at::Tensor> replicas;  // by rank
  // By rank, of a whole one: those of the parts after the first.
  std::vector<std::vector<at::Tensor>> copies;
  std::vector<at::Tensor> waiting;  // by rank: not yet reduced
  at::Tensor gradient;              // gradient of the step; undefined: skipped
  at::Tensor clipped;               // the gradient that the step uses
  at::Tensor rounding;              // rounding of the gradient
  at::Tensor master;
  std::vector<at::Tensor> states;  // states of its optimizer
  int64_t steps = 0;
  std::optional<size_t> group;  // nullopt: in no group
  OracleRandom random;
};

inline bool Is16Bit(at::ScalarType type) {
  return type == at::kBFloat16 || type == at::kHalf;
}

inline at::Tensor Reals(const at::Tensor& t) {
  return t.is_complex() ? at::view_as_real(t.resolve_conj()) : t;
}

}  // namespace tessera
#endif  // VERIFY_ORACLE_PARAMETER_H_
