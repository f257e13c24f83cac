// Job: which rank this process is and where it meets the others, read from
// argv and the environment. No torch, no network.
#ifndef COMM_JOB_H_
#define COMM_JOB_H_

#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace tessera {

// The flags of Init; see comm/world.h.
struct JobFlags {
  std::optional<int> world;
  std::optional<std::string> rendezvous;
  std::optional<int> rank;
  std::optional<int> world_size;
  std::optional<absl::Duration> startup_timeout;
};

// Takes them out of argv; what stands after "--" is left alone. Returns
// InvalidArgument naming the flag whose value does not fit; then argv is left
// as it was.
absl::StatusOr<JobFlags> TakeJobFlags(int* argc, char** argv);

struct Job {
  int rank = 0;
  int world_size = 1;
  std::string rendezvous;  // tcp:// or file://, empty in a world of one
  // A launcher hosts the store that tcp:// leads to.
  bool store_hosted = false;
  // Tells apart the runs of a job that its launcher restarts.
  std::string attempt;
};

// From flags and the environment (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT,
// TORCHELASTIC_USE_AGENT_STORE, TORCHELASTIC_RESTART_COUNT). `launched`: by
// --world, whose environment always holds them. Returns InvalidArgument naming
// the flag or variable.
absl::StatusOr<Job> FindJob(const JobFlags& flags, bool launched);

// The same text for all processes of a running host, and for no other.
std::string HostId();

}  // namespace tessera
#endif  // COMM_JOB_H_
