// Reads what launchers set in the environment: this process's rank, the number
// of ranks, and where they can meet. Pure: a map of variables to a Placement;
// no torch, no network. A variable that is empty counts as absent.
//
//   launcher   rank                  ranks                 on this host
//   torchrun   RANK                  WORLD_SIZE            LOCAL_RANK,
//                                                          LOCAL_WORLD_SIZE
//   Open MPI   OMPI_COMM_WORLD_RANK  OMPI_COMM_WORLD_SIZE  OMPI_COMM_WORLD_
//                                                          LOCAL_RANK, _SIZE
//   MPICH      PMI_RANK              PMI_SIZE              MPI_LOCALRANKID,
//   (Hydra)                                                MPI_LOCALNRANKS
//   Slurm      SLURM_PROCID          SLURM_STEP_NUM_TASKS  SLURM_LOCALID,
//   (srun)                           or SLURM_NTASKS       ..._TASKS_PER_NODE
//
// The first of them that is there counts, in this order: a torchrun may itself
// be started by srun, and mpirun starts its daemons by srun, so that the inner
// launcher's word stands before the outer one's. Two exceptions:
//   - Slurm's variables also stand in the shell of salloc, in an interactive
//     step and in sbatch's script, where nothing starts several ranks. So they
//     count only in an ordinary step (SLURM_STEP_ID), which srun makes.
//   - srun --mpi=pmi2 sets PMI_RANK too. Without MPI_LOCALRANKID, in a step, it
//     is Slurm's.
#ifndef COMM_LAUNCH_LAUNCH_VARIABLES_H_
#define COMM_LAUNCH_LAUNCH_VARIABLES_H_

#include <cstdint>
#include <map>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace tessera {

using Variables = std::map<std::string, std::string>;

// Returns this process's environment.
Variables EnvironmentVariables();

// Returns a variable; nullopt if absent or empty.
std::optional<std::string> Find(const Variables& variables,
                                const std::string& name);
// Finds a variable that is a decimal integer. Returns InvalidArgument with the
// variable and its text.
absl::StatusOr<std::optional<int>> FindInt(const Variables& variables,
                                           const std::string& name, int min,
                                           int max);

inline constexpr int kMaxWorldSize = 1 << 20;

struct Placement {
  std::string launcher;  // "torchrun", "Open MPI", "MPICH", "Slurm"
  std::optional<int> rank;
  std::optional<int> world_size;
  // The variables they were read from, or would have been, for messages.
  std::string rank_name, world_size_name;
  std::optional<int> local_rank, local_world_size;
  // Where ranks meet unless MASTER_ADDR says so: rank 0's host. Empty if the
  // launcher does not tell; then `host_missing` says what to do.
  std::string host;
  std::string host_missing;
  // An id that all ranks of the job share, and that differs for other jobs on
  // these hosts, if the launcher gives one; empty for torchrun.
  std::string job_id;
};

// Returns what the launcher says, or nullopt if there is none. `hydra_proxy` is
// the process id of MPICH's proxy on this host, "" if unknown (see
// FindHydraProxy). rank and world_size may be absent, for the caller to take
// from elsewhere; but what is there fits together. Returns InvalidArgument
// naming the variable and its value.
absl::StatusOr<std::optional<Placement>> FindPlacement(
    const Variables& variables, const std::string& hydra_proxy);

// 10000 to 29999, below the ports that Linux gives out by itself (32768 on).
// Two jobs may get the same one; then rank 0 of the later says that it is in
// use, and MASTER_PORT is the fix.
uint16_t DerivedPort(absl::string_view job_id);

// MPICH tells no id of the job. But all ranks of a host descend from one
// process, hydra_pmi_proxy; this is its id, or "".
std::string FindHydraProxy();

}  // namespace tessera
#endif  // COMM_LAUNCH_LAUNCH_VARIABLES_H_
