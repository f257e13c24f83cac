// Rates: what a rank gets done in a second while all ranks are at it, measured:
// what a plan's times are made of.
#ifndef ENGINE_PLAN_RATES_H_
#define ENGINE_PLAN_RATES_H_

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace tessera {

class Communicator;  // comm/communicator.h
struct SwapOptions;  // offload/disk/swap_file.h

// seconds + bytes * seconds_per_byte; of a collective the bytes of the whole
// tensor.
struct RateLine {
  double seconds = 0;
  double seconds_per_byte = 0;
  double Of(int64_t bytes) const {
    return seconds + static_cast<double>(bytes) * seconds_per_byte;
  }
};

struct Rates {
  // Products of matrices of float32, and of bfloat16.
  double flops_per_second = 0;
  double half_flops_per_second = 0;
  // Read and written by elementwise operators.
  double bytes_per_second = 0;
  // An operator takes so long at least.
  double seconds_per_operator = 0;
  RateLine all_gather, reduce_scatter, all_reduce;
  // Of parameters before their use: all_gather, or what it takes to read the
  // others' shards (comm/shard_server.h), as ranks over gloo do.
  RateLine gather;
  // Which part of a collective's time, and of a gather's, a step takes longer
  // although it computes meanwhile: 0 where another processor does it, 1 where
  // the same does.
  double exposed = 1, gather_exposed = 1;
  int world_size = 1;  // of the group; 1: nothing is known of collectives
  // Bytes of a rank, from a disk and to it; 0: nothing is known of one.
  double disk_read_per_second = 0, disk_written_per_second = 0;
};

// Of the CPU. Takes 0.4 s over shared memory, 1.3 s over gloo on one host; rank
// 0's figures, the same on all. COLLECTIVE.
// Errors are those of collectives.
absl::StatusOr<Rates> MeasureRates(Communicator* comm);
// Sets those of the disk: each rank moves some 64 MiB there and back, as
// offload does, all at the same time. The file goes with the call. The slowest
// rank's figures, the same on all. COLLECTIVE. Errors are the disk's, and those
// of collectives.
absl::Status MeasureDisk(const SwapOptions& disk, Communicator* comm,
                         Rates* rates);

// With the collectives of `ranks` each of which sends `bytes_per_second` around
// a ring, and waits `latency_seconds` for each message.
Rates OverNetwork(Rates rates, int ranks, double bytes_per_second,
                  double latency_seconds);
// Of a group of another size, whose ranks send as fast; as they are if nothing
// is known of collectives.
Rates AtWorldSize(Rates rates, int ranks);

}  // namespace tessera
#endif  // ENGINE_PLAN_RATES_H_
