// What one AdamW update works on, in tensors, for tests of kernels.
#ifndef OPTIM_CUDA_ADAMW_TESTING_H_
#define OPTIM_CUDA_ADAMW_TESTING_H_

#include <cstdint>

#include "optim/adamw_kernel.h"
#include "torch/torch.h"

namespace tessera {

struct AdamWState {
  // float32 [numel] each, on the CPU, the second moments at least 0; a working
  // copy of zeros. `values`: [numel] of them.
  template <typename Values>
  AdamWState(int64_t numel, WorkingType type, const Values& values)
      : type(type),
        master(values(numel)),
        exp_avg(values(numel)),
        exp_avg_sq(values(numel).abs()),
        gradient(values(numel)),
        working(torch::zeros({numel}, type == WorkingType::kFloat32 ? at::kFloat
                                      : type == WorkingType::kFloat16
                                          ? at::kHalf
                                          : at::kBFloat16)) {}
  AdamWState To(c10::Device device) const {
    AdamWState other = *this;
    for (at::Tensor* t : {&other.master, &other.exp_avg, &other.exp_avg_sq,
                          &other.gradient, &other.working}) {
      *t = t->to(device, /*non_blocking=*/false, /*copy=*/true);
    }
    return other;
  }
  AdamWRange Range() const {
    AdamWRange r;
    r.master = master.mutable_data_ptr<float>();
    r.exp_avg = exp_avg.mutable_data_ptr<float>();
    r.exp_avg_sq = exp_avg_sq.mutable_data_ptr<float>();
    r.gradient = gradient.const_data_ptr<float>();
    r.numel = master.numel();
    r.working_type = type;
    if (type != WorkingType::kNone) r.working = working.mutable_data_ptr();
    return r;
  }
  WorkingType type;
  at::Tensor master, exp_avg, exp_avg_sq, gradient, working;
};

}  // namespace tessera
#endif  // OPTIM_CUDA_ADAMW_TESTING_H_
