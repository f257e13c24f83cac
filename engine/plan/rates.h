// Rates: measured speeds of a rank while all ranks work, from which a plan's
// times are computed.
#ifndef ENGINE_PLAN_RATES_H_
#define ENGINE_PLAN_RATES_H_

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace tessera {

class Communicator;  // comm/communicator.h
struct SwapOptions;  // offload/disk/swap_file.h

// A time that is linear in bytes: seconds + bytes * seconds_per_byte. For a
// collective, the bytes are those of the whole tensor.
struct RateLine {
  double seconds = 0;
  double seconds_per_byte = 0;
  double Of(int64_t bytes) const {
    return seconds + static_cast<double>(bytes) * seconds_per_byte;
  }
};

struct Rates {
  // Speed of matrix products in float32, and in bfloat16.
  double flops_per_second = 0;
  double half_flops_per_second = 0;
  // Bytes that elementwise operators read and write.
  double bytes_per_second = 0;
  // The least time that an operator takes.
  double seconds_per_operator = 0;
  RateLine all_gather, reduce_scatter, all_reduce;
  // A gather of parameters before their use: all_gather, or the time to read
  // the others' shards (comm/shard_server.h), as ranks over gloo do.
  RateLine gather;
  // The part of a collective's time, and of a gather's, that a step takes
  // longer although it computes meanwhile: 0 where another processor does the
  // work, 1 where the same one does.
  double exposed = 1, gather_exposed = 1;
  int world_size = 1;  // of the group; 1: nothing is known of collectives
  // Bytes per second of a rank, from a disk and to it; 0: not known.
  double disk_read_per_second = 0, disk_written_per_second = 0;
};

// Measures the rates of the CPU: 0.4 s over shared memory, 1.3 s over gloo on
// one host. Returns rank 0's figures on all ranks. COLLECTIVE. Errors are those
// of collectives.
absl::StatusOr<Rates> MeasureRates(Communicator* comm);
// Measures and sets the disk's rates: each rank moves about 64 MiB there and
// back, as offload does, all at the same time. The file is removed by the end
// of the call. The figures are the slowest rank's, on all ranks. COLLECTIVE.
// Errors are the disk's, and those of collectives.
absl::Status MeasureDisk(const SwapOptions& disk, Communicator* comm,
                         Rates* rates);

// Returns `rates` with ring collectives over `ranks` ranks, each of which sends
// `bytes_per_second` and waits `latency_seconds` for each message.
Rates OverNetwork(Rates rates, int ranks, double bytes_per_second,
                  double latency_seconds);
// Returns `rates` for a group of `ranks` ranks that send as fast; unchanged if
// nothing is known of collectives.
Rates AtWorldSize(Rates rates, int ranks);

}  // namespace tessera
#endif  // ENGINE_PLAN_RATES_H_
