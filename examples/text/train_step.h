// Runs one optimizer step over batches of tokens.
#ifndef EXAMPLES_TEXT_TRAIN_STEP_H_
#define EXAMPLES_TEXT_TRAIN_STEP_H_

#include <functional>

#include "ATen/core/Tensor.h"
#include "absl/status/statusor.h"
#include "examples/text/token_loader.h"
#include "tessera/tessera.h"

// Returns the loss of a batch, a scalar; called under the engine's autocast.
using LossOf = std::function<at::Tensor(const TokenBatch& batch)>;

// Takes one batch of `loader` per accumulation step through Backward and Step.
// Returns the sum of this rank's losses: a new float32 tensor on their device,
// without a graph. COLLECTIVE; a rank whose data fail announces that, so the
// others do not wait.
absl::StatusOr<at::Tensor> TrainStep(tessera::Engine* engine,
                                     tessera::DataLoader* loader,
                                     const LossOf& loss_of);

#endif  // EXAMPLES_TEXT_TRAIN_STEP_H_
