// Rank program: what the benchmarks that run on several ranks share.
#ifndef BENCHMARKS_RANK_PROGRAM_H_
#define BENCHMARKS_RANK_PROGRAM_H_

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/status.h"
#include "base/torch_guard.h"
#include "benchmarks/program.h"
#include "comm/all_gather_values.h"
#include "comm/world/world.h"

namespace tessera {

// Reads the flags, those of Init aside, which finds them in argv.
inline absl::Status ReadRankFlags(int argc, char** argv) {
  TESSERA_ASSIGN_OR_RETURN(std::vector<char*> own,
                           WithoutInitFlags(argc, argv));
  return ReadFlags(static_cast<int>(own.size()), own.data());
}

// Returns main's result: that of run(argc, argv), then leaves the job.
template <typename Run>
int RunRank(const char* program, int argc, char** argv, const Run& run) {
  const absl::Status status =
      CatchTorch("libtorch", [&] { return run(argc, argv); });
  const int result = EndOf(program, status);
  Shutdown();
  return result;
}

// Returns the sum over ranks. COLLECTIVE.
template <typename T>
absl::StatusOr<T> SumOfRanks(Communicator* comm, T mine) {
  TESSERA_ASSIGN_OR_RETURN(const std::vector<T> all,
                           AllGatherValue(comm, mine, {"sum"}));
  T sum = 0;
  for (const T value : all) sum += value;
  return sum;
}

// Returns the times that body() takes from when all ranks are there until all
// are done: the processor time of all ranks together. COLLECTIVE.
template <typename Body>
absl::StatusOr<Times> TimesOfRanks(Communicator* comm, const Body& body) {
  TESSERA_RETURN_IF_ERROR(comm->Barrier("begin"));
  TESSERA_ASSIGN_OR_RETURN(Times times, TimesOf([&]() -> absl::Status {
                             TESSERA_RETURN_IF_ERROR(body());
                             return comm->Barrier("end");
                           }));
  TESSERA_ASSIGN_OR_RETURN(times.cpu, SumOfRanks(comm, times.cpu));
  return times;
}

}  // namespace tessera
#endif  // BENCHMARKS_RANK_PROGRAM_H_
