#include "examples/text/train_step.h"

#include <cstdint>
#include <vector>

#include "ATen/Functions.h"
#include "tessera/tessera.h"

absl::StatusOr<at::Tensor> TrainStep(tessera::Engine* engine,
                                     tessera::DataLoader* loader,
                                     const LossOf& loss_of) {
  TESSERA_ASSIGN_OR_RETURN(
      const std::vector<at::Tensor> losses,
      engine->TrainBatch(
          [&](int64_t /*micro_batch*/) -> absl::StatusOr<at::Tensor> {
            TESSERA_ASSIGN_OR_RETURN(const tessera::Batch samples,
                                     loader->Next());
            const tessera::Engine::AutocastScope autocast(engine);
            return loss_of(TokenBatch(samples.tensors[0]));
          }));
  at::Tensor sum;
  for (const at::Tensor& loss : losses) {
    if (!sum.defined()) sum = at::zeros({}, loss.options().dtype(at::kFloat));
    sum += loss;
  }
  return sum;
}
