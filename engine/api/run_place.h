// RunPlace: where a run is.
#ifndef ENGINE_API_RUN_PLACE_H_
#define ENGINE_API_RUN_PLACE_H_

#include <cstdint>

namespace tessera {

struct RunPlace {
  int64_t step = 0;           // optimizer steps done
  int64_t skipped_steps = 0;  // and skipped
  int64_t samples = 0;        // of all ranks, in both
};

}  // namespace tessera
#endif  // ENGINE_API_RUN_PLACE_H_
