// The launcher of local ranks (--world=N): starts this program N times and
// supervises it. Knows processes and signals, but neither torch nor stores.
//
//   parent ----fork+exec----> rank 0 .. rank N-1   same argv; RANK, WORLD_SIZE,
//     |  hosts the store         |                 LOCAL_*, MASTER_* set
//     +--- waits for all <-------+
//     +--- tells who ended ----> the others        TakeLauncherNews
//
// The first rank that fails is named on stderr, and ends the job: the others
// get kEndGrace to end by themselves (they learn of it through the store or see
// the broken connection), then SIGTERM, then SIGKILL. Nothing stays behind:
// every rank is reaped before the parent ends, and the ranks die with the
// parent.
//
// SIGINT, SIGTERM and SIGHUP are passed on to all ranks. From the first one on
// these have signal_grace (--grace) to end, whatever the others do: time to
// save a checkpoint, say. Then comes SIGKILL, and a line names these ranks. A
// signal that is ignored when the parent is started (SIGHUP under nohup, SIGINT
// of a script's background job) stays so, in the parent and in the ranks.
#ifndef COMM_LAUNCH_LAUNCHER_H_
#define COMM_LAUNCH_LAUNCHER_H_

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace tessera {

inline constexpr absl::Duration kEndGrace = absl::Seconds(10);
inline constexpr absl::Duration kTermGrace = absl::Seconds(5);
inline constexpr absl::Duration kSignalGrace = absl::Seconds(10);

// Which lines of the ranks the parent passes on with "[rank] " before them (see
// comm/launch/output_relay.h).
//   kAuto  those of stderr, where all ranks complain at once. stdout is left
//          alone: it is what the program makes, read by other programs (a JSON
//          line, a list of losses) or a bar that draws itself on a terminal,
//          and mostly rank 0's alone.
//   kOn    those of stdout too
//   kOff   none; the ranks have the parent's own stdout and stderr
enum class PrefixOutput { kAuto, kOn, kOff };

struct LaunchOptions {
  int world_size = 1;
  PrefixOutput prefix_output = PrefixOutput::kAuto;
  std::vector<std::string> argv;
  // Where ranks meet, in a store that this process hosts: MASTER_ADDR and
  // MASTER_PORT, and how they prove who they are.
  std::vector<std::pair<std::string, std::string>> meeting;
  absl::Duration end_grace = kEndGrace;    // from a failure to SIGTERM
  absl::Duration term_grace = kTermGrace;  // from that SIGTERM to SIGKILL
  // From the first signal that is passed on to SIGKILL; may be infinite.
  absl::Duration signal_grace = kSignalGrace;
  // Called when a rank has ended: how ("ended (exit code 3)"), and if well.
  std::function<void(int rank, bool ok, const std::string& how)> on_end;
};

// Runs the ranks to their end; returns the exit code for this process: the
// first failure's, or 0; of failures that are seen at one time a signal goes
// before an exit code, which may follow from it. Takes over SIGCHLD, and
// SIGINT, SIGTERM and SIGHUP unless they are ignored, for good. LOCAL,
// blocking. Returns Unavailable if a rank cannot be started.
absl::StatusOr<int> LaunchAndWait(const LaunchOptions& options);

// The environment that tells a process that it is rank `rank` of `world_size`
// local ranks. `meeting`: see LaunchOptions.
std::vector<std::pair<std::string, std::string>> LocalRankEnvironment(
    int rank, int world_size,
    std::vector<std::pair<std::string, std::string>> meeting);

// True in a process started with LocalRankEnvironment by its parent. Takes the
// private mark out of the environment, so that programs started from here are
// not taken for ranks; later calls return the first one's answer.
bool IsLaunchedRank();

// In a launched rank: a socket from which each message is the number, an
// int32_t, of a rank that the launcher has seen end other than well, whoever
// may hold that rank's own connections. -1 if there is none, or it was taken.
// The caller closes it.
int TakeLauncherNews();

}  // namespace tessera
#endif  // COMM_LAUNCH_LAUNCHER_H_
