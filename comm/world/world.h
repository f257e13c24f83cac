// World: this process's place among the processes of the job, and the default
// group of all of them.
#ifndef COMM_WORLD_WORLD_H_
#define COMM_WORLD_WORLD_H_

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "comm/communicator.h"

namespace tessera {

// Options of Init; WorldOptionsFrom (engine/program/start.h) makes them from a
// configuration.
struct WorldOptions {
  // "auto": nccl where this build has CUDA and every rank has a GPU of its own;
  // shm where all ranks are on one host and can share memory; hierarchical
  // where some can; gloo otherwise. Or one of the names that docs/config.md has
  // for communication.backend.
  std::string backend = "auto";
  absl::Duration startup_timeout = absl::Seconds(60);
  absl::Duration collective_timeout = absl::Minutes(5);
  // NCCL's environment variables, by name. Set in this process at Init, unless
  // the environment holds them or the backend is neither "auto" nor "nccl".
  std::map<std::string, std::string> nccl_environment;
  // How long a peer's announcement stands before it ends a collective.
  absl::Duration announce_grace = kAnnounceGrace;
  // Where a rank writes its last collectives and the stacks of its threads when
  // it gives up waiting for others (comm/record/hang_dump.h). Empty: what
  // TESSERA_DUMP_FOLDER says, or TMPDIR, or /tmp. "off": nowhere.
  std::string dump_folder;
  // Ranks of one host share memory only if they have the same memory_group.
  std::string memory_group;
  // nccl: sums are in rank order, as with all other backends, by an all-to-all
  // and a kernel of our own. Off: NCCL's own reduce-scatter, which is faster
  // and has an order of its own.
  bool ordered_sums = true;
  // On hosts with several memory nodes each rank runs on its share of them
  // (comm/launch/numa.h), unless its launcher has bound it already. No
  // computing thread may be started before that.
  bool numa_binding = false;
};

class World {
 public:
  // The world that Init made, or nullptr before.
  static const World* Current();

  int rank() const { return rank_; }
  int world_size() const { return world_size_; }
  int local_rank() const { return local_rank_; }
  int local_world_size() const { return local_world_size_; }
  // The device that this rank should train on, for EngineOptions::device. With
  // a backend of devices, it is the GPU, among those that the rank sees, whose
  // number is its local rank; likewise for a single rank, if such a backend
  // would be possible; else the CPU. Init has made it this thread's current
  // device.
  at::Device device() const { return device_; }
  // The options given to Init, with changes by flags.
  const WorldOptions& options() const { return options_; }
  // The value of --plan_world; 0 without it.
  int plan_world() const { return plan_world_; }
  // The group of all ranks. Borrowed users keep their own reference.
  const std::shared_ptr<Communicator>& communicator() const { return comm_; }

 private:
  friend class WorldBuilder;  // comm/world/init.cc
  int rank_ = 0, world_size_ = 1, local_rank_ = 0, local_world_size_ = 1;
  int plan_world_ = 0;
  at::Device device_ = at::kCPU;
  WorldOptions options_;
  std::shared_ptr<Communicator> comm_;
};

// Joins the job. The first of these that is set says which rank this is (all
// variables: comm/launch/launch_variables.h):
//   --world=N in argv   starts N local ranks: this process re-executes itself N
//                       times, only supervises them, and exits with the first
//                       failure's code; it never returns from here. The
//                       children see the same argv. With N = 1 this process
//                       itself is the world. Takes precedence over any
//                       launcher, so it works inside salloc or a step of one
//                       task.
//   --rank, --world_size, --rendezvous
//                       each takes precedence over the launcher's variable
//   torchrun            RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT
//   Open MPI            OMPI_COMM_WORLD_RANK, _SIZE, _LOCAL_RANK, _LOCAL_SIZE
//   MPICH               PMI_RANK, PMI_SIZE, MPI_LOCALRANKID, MPI_LOCALNRANKS
//   Slurm's srun        SLURM_PROCID, SLURM_NTASKS, SLURM_STEP_NODELIST, ...
//   none                a world of one
//
// Where ranks meet: --rendezvous=tcp://host:port or file:///path; otherwise
// (env://) MASTER_ADDR and MASTER_PORT. If these are absent, the host is the
// first of Slurm's list, or 127.0.0.1 if mpirun has all ranks on this host, and
// the port is derived from the job's id; mpirun on several hosts needs
// MASTER_ADDR, MPICH there MASTER_PORT too. On several hosts Gloo listens at
// the address from which this host reaches the rendezvous, or at the interface
// in GLOO_SOCKET_IFNAME.
//
// --prefix_output=auto|on|off: which lines of --world's ranks get "[rank] "
// before them (comm/launch/launcher.h). --grace=SECONDS: how long --world's
// ranks may go on after a SIGTERM, SIGINT or SIGHUP that was passed on to them
// (10; inf: forever). --startup_timeout=SECONDS overrides
// options.startup_timeout, --numa_binding=node|off overrides
// options.numa_binding. --plan_world=N: the program wants to know what each
// of N ranks would hold, and ends with it where its engine is made
// (EngineOptions::planned_loss). All flags read here are removed from argv;
// each may also be written --world N.
//
// Sets libtorch's threads to this rank's share of the host's processors and
// cgroup limit (comm/launch/cpus.h), never above libtorch's own number, unless
// OMP_NUM_THREADS is set. TESSERA_VERBOSE=comm says what was chosen.
//
// COLLECTIVE over the ranks of the job; ends within the start-up timeout, and
// at most two seconds more to find who is missing. Errors: InvalidArgument
// naming the flag, variable or option; Unavailable naming the address in use or
// the rank that ended; DeadlineExceeded naming the ranks that did not come;
// PermissionDenied if the file of file:// is not for this user alone.
absl::StatusOr<const World*> Init(int* argc, char** argv,
                                  WorldOptions options = {});

// InitFlag is what a program's --help says of a flag of Init's.
struct InitFlag {
  std::string name, value;  // "world", "N"
  std::string text;         // "Start N ranks on this host."
};
// Returns all flags that Init reads.
std::vector<InitFlag> InitFlags();

// InitArguments are the arguments of a program, taken apart.
struct InitArguments {
  std::vector<char*> rest;  // what Init leaves, argv[0] first
  int world = 0;            // the value of --world; 0 without it
  int plan_world = 0;       // the value of --plan_world; 0 without it
};
// Takes Init's flags out, and leaves argv as it is. LOCAL. InvalidArgument as
// Init.
absl::StatusOr<InitArguments> SplitInitFlags(int argc, char** argv);

// Returns the arguments that Init leaves, for a program whose own flags name
// the configuration from which it makes Init's options. LOCAL. InvalidArgument
// as Init.
absl::StatusOr<std::vector<char*>> WithoutInitFlags(int argc, char** argv);

// Leaves the job: waits for this rank's pending collectives, and at most 5 s
// for ranks that still read its shards (of an engine that was destroyed without
// Close); closes the backends of devices, for which it waits at most 30 s; then
// writes the communication log and trace where TESSERA_COMM_LOG says
// (docs/communication.md). LOCAL.
void Shutdown();

}  // namespace tessera
#endif  // COMM_WORLD_WORLD_H_
