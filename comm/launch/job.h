// Job: finds which rank this process is and where it meets the others, from
// argv and the environment. No torch, no network.
#ifndef COMM_LAUNCH_JOB_H_
#define COMM_LAUNCH_JOB_H_

#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "comm/launch/launch_variables.h"
#include "comm/launch/launcher.h"

namespace tessera {

// The flags of Init; see comm/world/world.h.
struct JobFlags {
  std::optional<int> world;
  std::optional<std::string> rendezvous;
  std::optional<int> rank;
  std::optional<int> world_size;
  std::optional<absl::Duration> startup_timeout;
  std::optional<int> plan_world;
  PrefixOutput prefix_output = PrefixOutput::kAuto;
  absl::Duration grace = kSignalGrace;
  std::optional<bool> numa_binding;
};

// JobFlagHelp is what a program's --help says of a flag.
struct JobFlagHelp {
  const char* name;
  const char* value;  // what stands for its value: "N"
  const char* text;
};
// Returns all flags that TakeJobFlags takes, in the order of their use.
std::vector<JobFlagHelp> AllJobFlags();

// Takes the flags out of argv, except those after "--". Returns InvalidArgument
// with the flag whose value is invalid; then argv is left as it was.
absl::StatusOr<JobFlags> TakeJobFlags(int* argc, char** argv);

// Returns an argument that TakeJobFlags left and that resembles --world,
// --world_size or --rendezvous: "'--wrld=2' (did you mean --world?)". ""
// without one. For a process that was not started as a rank. Pure.
std::string MisspeltJobFlag(int argc, char* const* argv);

// What FindJob uses besides the flags.
struct JobSources {
  Variables variables;
  std::string hydra_proxy;  // see comm/launch/launch_variables.h
  // By --world, whose environment always holds torchrun's variables.
  bool launched = false;
};
JobSources SourcesOfThisProcess(bool launched);

struct Job {
  int rank = 0;
  int world_size = 1;
  std::string rendezvous;  // tcp:// or file://, empty in a world of one
  // A launcher hosts the store that tcp:// leads to.
  bool store_hosted = false;
  // Distinguishes the runs of a job that its launcher restarts, and jobs that
  // were given the same port.
  std::string attempt;
  // Who started this rank: "--world", "torchrun", "Open MPI", "MPICH", "Slurm",
  // "flags", or "nobody".
  std::string launcher = "nobody";
};

// The first that says something: --world=1 (a world of one); --rank,
// --world_size and --rendezvous, each before the launcher's word for it;
// torchrun, Open MPI, MPICH, Slurm (see comm/launch/launch_variables.h). Where
// ranks meet: --rendezvous; MASTER_ADDR and MASTER_PORT; what the launcher
// tells or allows to derive. Pure. Returns InvalidArgument naming the flag or
// variable.
absl::StatusOr<Job> FindJob(const JobFlags& flags, const JobSources& sources);

}  // namespace tessera
#endif  // COMM_LAUNCH_JOB_H_
