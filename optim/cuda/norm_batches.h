// Batches of a norm's parts, each of one dtype: what a launch takes.
#ifndef OPTIM_CUDA_NORM_BATCHES_H_
#define OPTIM_CUDA_NORM_BATCHES_H_

#include "ATen/core/Tensor.h"
#include "ATen/ops/view_as_real.h"
#include "absl/types/span.h"
#include "c10/util/BFloat16.h"
#include "c10/util/Half.h"
#include "optim/cuda/norm_math.h"
#include "optim/device_kernels.h"

namespace tessera {

// Visits those of dtype T.
template <typename T, typename Visit>
void VisitNormBatchesOf(at::ScalarType dtype, absl::Span<const NormPart> parts,
                        const Visit& visit) {
  NormBatch<T> batch;
  for (const NormPart& part : parts) {
    const bool complex = part.segment.is_complex();
    // The parts of a number are neighbours.
    const at::Tensor real =
        complex ? at::view_as_real(part.segment).flatten() : part.segment;
    if (real.scalar_type() != dtype || real.numel() == 0) continue;
    if (batch.full()) {
      visit(batch);
      batch = {};
    }
    batch.Add(NormSegment<T>(real.const_data_ptr<T>(), real.numel(),
                             complex ? 2 * part.first : part.first));
  }
  if (batch.count > 0) visit(batch);
}

// Calls visit(batch) for all parts that have elements: NormBatch<T> of each
// dtype T in turn. REQUIRES: the parts are contiguous.
template <typename Visit>
void VisitNormBatches(absl::Span<const NormPart> parts, const Visit& visit) {
  VisitNormBatchesOf<float>(at::kFloat, parts, visit);
  VisitNormBatchesOf<c10::BFloat16>(at::kBFloat16, parts, visit);
  VisitNormBatchesOf<c10::Half>(at::kHalf, parts, visit);
  VisitNormBatchesOf<double>(at::kDouble, parts, visit);
}

}  // namespace tessera
#endif  // OPTIM_CUDA_NORM_BATCHES_H_
