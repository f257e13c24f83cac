// What DeviceKernels (optim/device_kernels.h) keeps in the device's memory: a
// rank's sum of |x|^p, and the scalars of a step that follow from all ranks'
// sums. It does not include libtorch, since nvcc reads it, too.
#ifndef OPTIM_STEP_SCALARS_H_
#define OPTIM_STEP_SCALARS_H_

#include <cstdint>

namespace tessera {

// A rank's sum: 68 digits of ExactSum, lowest first, each below 2^32, and the
// bits of the greatest block that has no place there: of all for p = infinity,
// else of infinities and NaNs. (Doubles that are not negative are ordered as
// their bits; a NaN is 0x7ff8000000000000, the greatest.) Zeros: nothing was
// added.
inline constexpr int64_t kNormDigits = 68;
inline constexpr int64_t kNormWords = kNormDigits + 1;

// What FinishNorm writes, by index.
enum StepScalar : int {
  kFactor,          // of gradients: 1 / divisor, clipping included
  kSkip,            // 1: leave everything as it is; else 0
  kGradNorm,        // of the divided gradients
  kClippedNorm,     // the same after clipping; NaN if the step is skipped
  kReplicasDiffer,  // 0, or 1 + the first rank of a shard group whose sum is
                    // not the first group's
  kStepScalars
};

struct NormFinish {
  double p = 2;
  int64_t group_size = 1;  // ranks of a shard group; the others are replicas
  double divisor = 1;
  double max_norm = 0;  // 0: no clipping
  bool skip_on_overflow = false;
};

}  // namespace tessera
#endif  // OPTIM_STEP_SCALARS_H_
