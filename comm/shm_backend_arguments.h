// What the shm backend takes: checks of arguments, and tensors as plain memory.
#ifndef COMM_SHM_BACKEND_ARGUMENTS_H_
#define COMM_SHM_BACKEND_ARGUMENTS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "ATen/core/Tensor.h"
#include "ATen/ops/empty.h"
#include "comm/shm/reduce.h"
#include "torch/csrc/distributed/c10d/Types.hpp"

namespace tessera {

using Tensors = std::vector<at::Tensor>;

// Throws "shm <op>: <what>" unless `ok`.
void CheckArgument(bool ok, const char* op, const std::string& what);
// A dense CPU tensor.
void CheckTensor(const char* op, const at::Tensor& t);
// Those of one dtype, `count` of them.
void CheckTensors(const char* op, const char* name, const Tensors& tensors,
                  size_t count);
// `a` has `times` the elements of `b`, and its dtype.
void CheckAlike(const char* op, const at::Tensor& a, const at::Tensor& b,
                int64_t times = 1);
void CheckRoot(const char* op, int64_t root, int size);

// How a reduction is done on real elements.
struct Reduction {
  shm::ElementType type = shm::ElementType::kFloat32;
  shm::ReduceOp op = shm::ReduceOp::kSum;
  const char* name = "";
  int64_t parts = 1;  // of an element: 2 for complex ones
};
Reduction ReductionOf(const char* op, const c10d::ReduceOp& reduce,
                      at::ScalarType type);

// `t` and each of `parts` but parts[own] must lie apart, and it must lie apart
// from that or be the same; -1: all apart. Strided ones are copied anyway.
void CheckApart(const char* op, const Tensors& parts, const at::Tensor& t,
                int own);

// Contiguous, neither conjugate nor negative but in its bits.
at::Tensor Plain(const at::Tensor& t);
bool IsPlain(const at::Tensor& t);

// `t`, contiguous, in as many equal parts.
Tensors PartsOf(const at::Tensor& t, int count);
// The part of each rank along the first dimension; empty `splits`: even ones.
Tensors SplitsOf(const char* name, const at::Tensor& t,
                 const std::vector<int64_t>& splits, int count);

int64_t Bytes(const at::Tensor& t);
// The first of some that lie one after the other, else a copy of all that does.
at::Tensor Joined(const Tensors& tensors);

// Contiguous memory for results, which Home brings to tensors of any stride.
class Results {
 public:
  explicit Results(const Tensors& tensors, bool with_content = false)
      : tensors_(tensors) {
    for (const at::Tensor& t : tensors) {
      flat_.push_back(IsPlain(t)     ? t
                      : with_content ? Plain(t)
                                     : at::empty(t.sizes(), t.options()));
    }
  }
  void* at(int i) const { return flat_[i].mutable_data_ptr(); }
  std::vector<void*> places() const {
    std::vector<void*> places;
    for (const at::Tensor& t : flat_) places.push_back(t.mutable_data_ptr());
    return places;
  }
  void Home() const {
    for (size_t i = 0; i < flat_.size(); ++i) {
      if (!flat_[i].is_same(tensors_[i])) tensors_[i].copy_(flat_[i]);
    }
  }

 private:
  const Tensors& tensors_;
  Tensors flat_;
};

}  // namespace tessera
#endif  // COMM_SHM_BACKEND_ARGUMENTS_H_
