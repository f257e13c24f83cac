// Strangers that attack the listening sockets of a job: random streams,
// mutations of a conversation that a rank has had, connections that are held in
// silence or in the middle of a handshake.
#ifndef TESTS_LAUNCH_ATTACK_H_
#define TESTS_LAUNCH_ATTACK_H_

#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "tests/support/process.h"

namespace tessera {

struct AttackTarget {
  std::string address, port;  // numeric
};

// Where `pid` listens for TCP, on all interfaces at `address`.
std::vector<AttackTarget> ListeningAt(pid_t pid, const std::string& address);
int64_t ResidentBytes(pid_t pid);

struct AttackOptions {
  std::vector<AttackTarget> targets;
  int streams = 10200;  // to each target; a few do not get through
  int held = 1100;      // connections to each target, as long as it lasts
  uid_t user = 0;       // whose process attacks
  // What a rank has sent and got in a handshake; "": not known.
  std::string sent, got;
  uint32_t seed = 1;
};

struct AttackReport {
  int64_t streams = -1;      // that were connected and sent
  int64_t closed_doors = 0;  // targets that take no connections
  // That a stranger got over one connection.
  int64_t most_bytes = -1;
  std::string error;
};

// A child that attacks; ends with this object.
class Attack {
 public:
  // `env`: see TwoHosts::Place.
  Attack(const AttackOptions& options, Env env = {});
  // All is held, and streams are on their way.
  bool WaitUntilUnderWay();
  // After all streams; connections are still held.
  AttackReport WaitUntilSent();

  // At the begin of main: ends the process if it is one of ours.
  static void ServeIfAttacker();

 private:
  std::unique_ptr<Process> process_;
};

}  // namespace tessera
#endif  // TESTS_LAUNCH_ATTACK_H_
