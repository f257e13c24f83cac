// RankPool runs ranks as processes, for tests of more than one rank.
//
//   TESSERA_RANK_FUNCTION(SumOfRanks) {  // (const World& world,
//     at::Tensor t = ...;                //  absl::string_view args)
//     TESSERA_RETURN_IF_ERROR(
//         world.communicator()->AllReduceSum(t, {"sum"}).Wait());
//     return absl::StrCat(t.item<float>());
//   }
//
//   TEST(Sum, OfThree) {
//     for (auto& answer : RankPool::Get(3)->Run("SumOfRanks", "")) {
//       EXPECT_THAT(answer, IsOkAndHolds("3"));
//     }
//   }
//
// The ranks are this test program, started W times (tests/support/fork_server.h
// makes that cheap). They join one world as the ranks of --world=W do, and then
// wait for work, so that one start serves all cases. The program's main() must
// be that of tests/support/rank_main.cc.
//
//   test process ==socketpair==> rank r      name and args; binary-safe
//                <==socketpair==             Status or string
//                <----pipe------ stderr      kept for messages; stdout is free
//
// If a rank dies, does not answer in time or its communicator has failed, all
// ranks of the pool are ended, and the next Run starts new ones. State that a
// rank function leaves in its process is visible to the next one.
//
// Threads: calls come from one thread, the one that lives to the end.
#ifndef TESTS_SUPPORT_RANK_POOL_H_
#define TESTS_SUPPORT_RANK_POOL_H_

#include <sys/types.h>

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "comm/rendezvous/hosted_store.h"
#include "comm/world/world.h"
#include "tests/support/fork_server.h"

namespace tessera {

using RankFunction = absl::StatusOr<std::string> (*)(const World& world,
                                                     absl::string_view args);

// Defines a function that runs in a rank; names are unique in a test program.
#define TESSERA_RANK_FUNCTION(Name)                                 \
  static ::absl::StatusOr<std::string> Name(                        \
      [[maybe_unused]] const ::tessera::World& world,               \
      [[maybe_unused]] ::absl::string_view args);                   \
  [[maybe_unused]] static const bool tessera_rank_function_##Name = \
      ::tessera::RegisterRankFunction(#Name, &Name);                \
  static ::absl::StatusOr<std::string> Name(                        \
      [[maybe_unused]] const ::tessera::World& world,               \
      [[maybe_unused]] ::absl::string_view args)

bool RegisterRankFunction(const char* name, RankFunction function);

// Returns the value of TESSERA_TEST_BACKEND, or shm.
std::string DefaultBackend();
// Returns the memory group (WorldOptions) of `rank`. For the hierarchical
// backend ranks 0 and 1 are on one host, 2 and 3 on the next, and so on.
std::string DefaultMemoryGroup(int rank);

struct RankPoolOptions {
  int world_size = 2;
  // This is shorter than Run's deadline, so that a hang is reported by who
  // waits for what.
  absl::Duration collective_timeout = absl::Seconds(40);
  // This is shorter than kAnnounceGrace, since tests that end by it would take
  // seconds.
  absl::Duration announce_grace = absl::Seconds(1);
  std::string backend = DefaultBackend();  // as in WorldOptions
  // The host of each rank. Empty: DefaultMemoryGroup.
  std::vector<int> hosts;
  int threads_per_rank = 1;
  // Ranks have no pages that forks of one process share.
  bool by_exec = false;
};

class RankPool {
 public:
  using Answers = std::vector<absl::StatusOr<std::string>>;  // by rank

  // Returns the program's pool of `world_size` ranks (1 is allowed).
  static RankPool* Get(int world_size);
  // Makes a separate pool.
  explicit RankPool(RankPoolOptions options);
  ~RankPool();
  // Ends the ranks of all pools that Get has made.
  static void EndAll();
  // How often ranks were started, by all pools, and how long that took.
  struct Starts {
    int count = 0;
    absl::Duration time;
  };
  static const Starts& starts();

  // Runs the function on every rank at once, with the same `args`. An answer is
  // what the function returned, or
  //   Unavailable       this rank died; how, and its stderr, are in the message
  //   DeadlineExceeded  the ranks named had not answered within `deadline`
  // Starts the ranks if there are none.
  Answers Run(absl::string_view function, absl::string_view args,
              absl::Duration deadline = absl::Seconds(60));

  // Returns what `rank` wrote to stderr during the last Run.
  const std::string& stderr_of(int rank) const { return ranks_[rank].err; }
  // Returns the process of `rank`, or 0; for tests that harm it.
  pid_t pid(int rank) const { return ranks_[rank].pid; }

 private:
  struct Rank {
    pid_t pid = 0;
    int socket = -1;
    int err_pipe = -1;
    std::string in;   // received and not yet parsed
    std::string err;  // stderr of the last Run
    bool answered = false;
    bool unusable = false;  // its communicator has failed
  };

  absl::Status Start();
  absl::Status StartRank(int r);
  absl::StatusOr<pid_t> StartProcess(const Environment& env, int stderr_fd,
                                     int socket_fd) const;
  void End();  // asks first, then kills
  void KillAll();
  // Sends the request to all; reads until all have answered or died, or
  // `allowed` is over.
  Answers Exchange(absl::string_view request, absl::string_view name,
                   absl::Duration allowed);
  void Poll(Answers* answers, absl::Time deadline);
  void ReadSocket(int r, Answers* answers);
  void ReadErr(int r);
  void Died(int r, Answers* answers);
  std::string NotAnswered() const;

  const RankPoolOptions options_;
  std::unique_ptr<HostedStore> store_;
  std::vector<Rank> ranks_;
  bool running_ = false;
};

// In a rank, serves the pool and ends the process. In the test process it
// starts what forks ranks, and returns. For tests/support/rank_main.cc.
void ServeIfRank(int* argc, char** argv);

}  // namespace tessera
#endif  // TESTS_SUPPORT_RANK_POOL_H_
