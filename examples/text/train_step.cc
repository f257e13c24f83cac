#include "examples/text/train_step.h"

#include <cstdint>

#include "ATen/Functions.h"
#include "tessera/tessera.h"

absl::StatusOr<at::Tensor> TrainStep(tessera::Engine* engine,
                                     tessera::DataLoader* loader,
                                     const LossOf& loss_of) {
  at::Tensor sum;
  const int64_t batches = engine->config().gradient_accumulation_steps();
  for (int64_t i = 0; i < batches; ++i) {
    const absl::StatusOr<tessera::Batch> samples = loader->Next();
    if (!samples.ok()) {  // the others learn it, and do not wait
      engine->Backward(at::Tensor()).IgnoreError();
      return samples.status();
    }
    at::Tensor loss;
    {
      const tessera::Engine::AutocastScope autocast(engine);
      loss = loss_of(TokenBatch(samples->tensors[0]));
    }
    if (!sum.defined()) sum = at::zeros({}, loss.options().dtype(at::kFloat));
    sum += loss.detach();
    TESSERA_RETURN_IF_ERROR(engine->Backward(loss));
    TESSERA_RETURN_IF_ERROR(engine->Step());
  }
  return sum;
}
