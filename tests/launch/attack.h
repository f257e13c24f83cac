// Attacks the listening sockets of a job as strangers may: with random streams,
// mutations of a rank's recorded conversation, and connections that are held in
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

// Returns the TCP sockets on which `pid` listens, those for all interfaces at
// `address`.
std::vector<AttackTarget> ListeningAt(pid_t pid, const std::string& address);
int64_t ResidentBytes(pid_t pid);

struct AttackOptions {
  std::vector<AttackTarget> targets;
  int streams = 10200;  // to each target; a few may not get through
  int held = 1100;      // connections to each target, held throughout
  uid_t user = 0;       // the user of the attacking process
  // What a rank has sent and received in a handshake; "": not known.
  std::string sent, got;
  uint32_t seed = 1;
};

struct AttackReport {
  int64_t streams = -1;      // that were connected and sent
  int64_t closed_doors = 0;  // targets that accept no connections
  // The most bytes that a stranger received over one connection.
  int64_t most_bytes = -1;
  std::string error;
};

// A child that attacks; it ends with this object.
class Attack {
 public:
  // `env` is that of TwoHosts::Place.
  Attack(const AttackOptions& options, Env env = {});
  // Waits until all connections are held, and streams are being sent.
  bool WaitUntilUnderWay();
  // Waits until all streams are sent; connections are still held.
  AttackReport WaitUntilSent();

  // Call it at the beginning of main: serves and ends the process if it is one
  // of ours.
  static void ServeIfAttacker();

 private:
  std::unique_ptr<Process> process_;
};

}  // namespace tessera
#endif  // TESTS_LAUNCH_ATTACK_H_
