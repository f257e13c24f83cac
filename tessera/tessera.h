// Tessera's public API, in one header:
//
//   #include <tessera/tessera.h>
//
//   start    Start, TESSERA_MAIN, Init, configurations, Status macros
//   train    Engine and its scopes, ParameterGroup, CustomOptimizer, Use,
//            ConstructSharded, Checkpointed, LinearCrossEntropy,
//            DivideSequence, Whole
//   data     DataLoader, TensorData, LoadInMemory, DistributedOrder,
//            client state
//   resume   CheckpointManager
//   measure  Evaluate, Mean, Accuracy, Perplexity, Monitor, MetricsWriter,
//            Summary, Progress
//
// The only header of libtorch that it needs is ATen/core/Tensor.h.
// tessera/extra.h has the rest of the API: what few programs use, or what needs
// more of libtorch.
#ifndef TESSERA_TESSERA_H_
#define TESSERA_TESSERA_H_

#include "engine/checkpoint_manager.h"        // IWYU pragma: export
#include "engine/construct_sharded.h"         // IWYU pragma: export
#include "engine/engine.h"                    // IWYU pragma: export
#include "engine/observe/monitor.h"           // IWYU pragma: export
#include "engine/program/start.h"             // IWYU pragma: export
#include "engine/progress.h"                  // IWYU pragma: export
#include "engine/summary.h"                   // IWYU pragma: export
#include "evaluation/evaluate.h"              // IWYU pragma: export
#include "loader/client_state.h"              // IWYU pragma: export
#include "loader/tensor_data.h"               // IWYU pragma: export
#include "nn/linear_cross_entropy.h"          // IWYU pragma: export
#include "parallel/tensor/divide_sequence.h"  // IWYU pragma: export
#include "sharding/recompute/checkpointed/checkpointed.h"  // IWYU pragma: export

#endif  // TESSERA_TESSERA_H_
