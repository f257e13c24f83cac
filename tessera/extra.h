// The part of the public API that tessera/tessera.h leaves out:
//
//   #include <tessera/extra.h>
//
//   before a run   Plan, ConstructFake: its memory; Verify: its exactness
//   layers         SyncBatchNorm, CheckpointedSequential
//   optimizers     FromTorch
//   data           mixtures of sets, tokens, images, tar files
//   files          Safetensors
//   the process    ProcessEnd, DataWaitNanos, kTesseraVersion
//
// It includes libtorch's modules and optimizers, which take a compiler several
// seconds. Where that matters, include the one header that is needed by its
// path from the archive's include folder: <tessera/verify/verify.h>.
#ifndef TESSERA_EXTRA_H_
#define TESSERA_EXTRA_H_

#include "base/system/process_end.h"       // IWYU pragma: export
#include "base/thread/wait_clock.h"        // IWYU pragma: export
#include "checkpoint/safetensors.h"        // IWYU pragma: export
#include "data/images/cifar.h"             // IWYU pragma: export
#include "data/images/made_images.h"       // IWYU pragma: export
#include "data/images/mnist.h"             // IWYU pragma: export
#include "data/mixture_order.h"            // IWYU pragma: export
#include "data/tar/tar_shards.h"           // IWYU pragma: export
#include "data/text/packed_corpus.h"       // IWYU pragma: export
#include "data/text/token_corpus.h"        // IWYU pragma: export
#include "data/text/token_writer.h"        // IWYU pragma: export
#include "engine/api/version.h"            // IWYU pragma: export
#include "engine/plan/plan.h"              // IWYU pragma: export
#include "nn/sync_batch_norm.h"            // IWYU pragma: export
#include "optim/custom/torch_optimizer.h"  // IWYU pragma: export
#include "sharding/recompute/checkpointed/checkpointed_sequential.h"  // IWYU pragma: export
#include "verify/verify.h"  // IWYU pragma: export

#endif  // TESSERA_EXTRA_H_
