// Limits on the values that a trace computes (sharding/trace/tracer.h).
#ifndef SHARDING_TRACE_TRACER_OPTIONS_H_
#define SHARDING_TRACE_TRACER_OPTIONS_H_

#include <cstdint>

namespace tessera {

struct TracerOptions {
  // Results of at most this many bytes are computed, if the values that they
  // depend on are known.
  int64_t known_bytes = 64 << 10;
  // Arguments of at most this many bytes may be made, of zeros, to find out the
  // sizes of an operator's results.
  int64_t compute_bytes = 16 << 20;
  // Other floating arguments of operators follow the parameters' dtype, as by
  // an engine (sharding/dispatch/cast_inputs.h).
  bool cast_inputs = false;
};

}  // namespace tessera
#endif  // SHARDING_TRACE_TRACER_OPTIONS_H_
