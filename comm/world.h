// World: what this process is among the processes of the job, and the default
// group of all of them.
#ifndef COMM_WORLD_H_
#define COMM_WORLD_H_

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "comm/communicator.h"

namespace tessera {

struct WorldOptions {
  // "auto": nccl where this build has CUDA, a GPU is there and it is this
  // rank's own; gloo otherwise. Or "gloo", "nccl".
  std::string backend = "auto";
  absl::Duration startup_timeout = absl::Seconds(60);
  absl::Duration collective_timeout = absl::Minutes(5);
  // How long a peer's announcement stands before it ends a collective.
  absl::Duration announce_grace = kAnnounceGrace;
  // Where a rank writes its last collectives and the stacks of its threads when
  // it gives up waiting for others (comm/hang_dump.h). Empty: what
  // TESSERA_DUMP_FOLDER says, or TMPDIR, or /tmp. "off": nowhere.
  std::string dump_folder;
  // nccl: sum in rank order, as gloo does, by an all-to-all and a kernel of our
  // own. Off: NCCL's own reduce-scatter, faster, in an order of its own.
  bool ordered_sums = true;
};

class World {
 public:
  // The world that Init made, or nullptr before.
  static const World* Current();

  int rank() const { return rank_; }
  int world_size() const { return world_size_; }
  int local_rank() const { return local_rank_; }
  int local_world_size() const { return local_world_size_; }
  // The group of all ranks. Borrowed users keep their own reference.
  const std::shared_ptr<Communicator>& communicator() const { return comm_; }

 private:
  friend class WorldBuilder;  // comm/init.cc
  int rank_ = 0, world_size_ = 1, local_rank_ = 0, local_world_size_ = 1;
  std::shared_ptr<Communicator> comm_;
};

// Joins the job. Reads, in this order:
//   --world=N in argv        starts N local ranks: this process re-executes
//                            itself N times, only supervises them, and exits
//                            with the first failure's code; it never returns
//                            from here. The children see the same argv. With
//                            N = 1 this process itself is the world.
//   torchrun's variables     RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE,
//                            MASTER_ADDR, MASTER_PORT (env:// rendezvous)
//   neither                  a world of one.
// --rendezvous=env://|tcp://host:port|file:///path (with --rank and
// --world_size, or RANK and WORLD_SIZE) overrides where ranks meet. All flags
// read here are removed from argv. COLLECTIVE over the ranks of the job; ends
// within options.startup_timeout, or what --startup_timeout=SECONDS says.
//
// Errors: InvalidArgument naming the flag or variable; Unavailable naming the
// address in use or the rank that ended; DeadlineExceeded naming the ranks that
// did not come.
absl::StatusOr<const World*> Init(int* argc, char** argv,
                                  WorldOptions options = {});

// Leaves the job: waits for this rank's pending collectives, then writes the
// communication log and trace where TESSERA_COMM_LOG and TESSERA_COMM_TRACE say
// (docs/communication.md). LOCAL.
void Shutdown();

}  // namespace tessera
#endif  // COMM_WORLD_H_
