// The public API of Tessera, in one header.
#ifndef ENGINE_TESSERA_H_
#define ENGINE_TESSERA_H_

#include "base/status.h"                // IWYU pragma: export
#include "checkpoint/safetensors.h"     // IWYU pragma: export
#include "config/config.h"              // IWYU pragma: export
#include "engine/checkpoint_manager.h"  // IWYU pragma: export
#include "engine/construct_sharded.h"   // IWYU pragma: export
#include "engine/engine.h"              // IWYU pragma: export
#include "engine/observe/monitor.h"     // IWYU pragma: export
#include "engine/plan/plan.h"           // IWYU pragma: export
#include "engine/program/start.h"       // IWYU pragma: export
#include "engine/progress.h"            // IWYU pragma: export
#include "sharding/flat/use.h"          // IWYU pragma: export
#include "sharding/recompute/checkpointed/checkpointed_sequential.h"  // IWYU pragma: export

#endif  // ENGINE_TESSERA_H_
