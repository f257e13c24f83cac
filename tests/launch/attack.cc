#include "tests/launch/attack.h"

#include <arpa/inet.h>
#include <dirent.h>
#include <netinet/in.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <fstream>
#include <random>
#include <set>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "tests/launch/two_hosts.h"

namespace tessera {
namespace {

constexpr char kAttack[] = "TESSERA_ATTACK";
// Connections that are checked again before they are closed.
constexpr size_t kOpen = 64;
// Tries of 0.4 s each, before a socket counts as closed.
constexpr int kTries = 5;

// ---- in the attacking process ----

sockaddr_storage AddressOf(const AttackTarget& target, socklen_t* size) {
  sockaddr_storage address = {};
  int port = 0;
  (void)absl::SimpleAtoi(target.port, &port);
  auto* v4 = reinterpret_cast<sockaddr_in*>(&address);
  v4->sin_family = AF_INET;
  v4->sin_port = htons(static_cast<uint16_t>(port));
  inet_pton(AF_INET, target.address.c_str(), &v4->sin_addr);
  *size = sizeof(*v4);
  return address;
}

int Connect(const AttackTarget& target) {
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const timeval patience = {0, 400000};
  setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof(patience));
  socklen_t size = 0;
  const sockaddr_storage address = AddressOf(target, &size);
  if (fd >= 0 &&
      connect(fd, reinterpret_cast<const sockaddr*>(&address), size) == 0) {
    return fd;
  }
  if (fd >= 0) close(fd);
  return -1;
}

class Attacker {
 public:
  explicit Attacker(AttackOptions options)
      : options_(std::move(options)), random_(options_.seed) {}

  int Run() {
    rlimit limit = {};
    getrlimit(RLIMIT_NOFILE, &limit);
    limit.rlim_cur = limit.rlim_max;
    setrlimit(RLIMIT_NOFILE, &limit);
    if (options_.user != 0 && setuid(options_.user) != 0) return 1;
    std::vector<AttackTarget> open;
    for (const AttackTarget& target : options_.targets) {
      if (Hold(target)) {
        open.push_back(target);
      } else {
        ++closed_doors_;
      }
    }
    for (int i = 0; i < options_.streams; ++i) {
      if (i == std::min(500, options_.streams - 1)) Say("under way\n");
      for (const AttackTarget& target : open) SendStream(target);
    }
    while (!recent_.empty()) CloseOldest();
    Say(absl::StrCat("sent ", streams_, " ", closed_doors_, " ", most_bytes_,
                     "\n"));
    while (true) pause();
  }

 private:
  static void Say(const std::string& line) {
    if (write(STDOUT_FILENO, line.data(), line.size()) < 0) _exit(1);
  }

  // Holds connections: half of them silent, half in the middle of a handshake.
  // Returns false if nobody takes connections.
  bool Hold(const AttackTarget& target) {
    int fd = -1;
    // Another attacker may have filled the queue at this door.
    for (int tries = 0; fd < 0 && tries < kTries; ++tries) fd = Connect(target);
    for (int i = 0; i < options_.held; ++i) {
      if (i > 0) fd = Connect(target);
      if (fd < 0) return i > 0;
      if (i % 2 == 1) Send(fd, options_.sent.substr(0, 28 - i % 28));
    }
    return true;
  }

  static void Send(int fd, const std::string& bytes) {
    (void)send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
  }

  std::string Stream() {
    const std::string& known =
        random_() % 2 == 0 ? options_.sent : options_.got;
    std::string bytes = random_() % 4 == 0 ? "" : known;
    if (bytes.empty()) {
      bytes.resize(random_() % 300);
      for (char& byte : bytes) byte = static_cast<char>(random_());
      return bytes;
    }
    // The message is sent unchanged, with a few bits changed, cut off, or
    // longer.
    for (size_t i = random_() % 4; i > 0; --i) {
      bytes[random_() % bytes.size()] ^= static_cast<char>(1 << random_() % 8);
    }
    if (random_() % 4 == 0) bytes.resize(random_() % (2 * bytes.size()));
    return bytes;
  }

  void SendStream(const AttackTarget& target) {
    const int fd = Connect(target);
    if (fd < 0) return;
    ++streams_;
    Send(fd, Stream());
    if (random_() % 4 == 0) shutdown(fd, SHUT_WR);
    recent_.push_back(fd);
    if (recent_.size() > kOpen) CloseOldest();
  }

  void CloseOldest() {
    const int fd = recent_.front();
    recent_.pop_front();
    char buffer[4096];
    int64_t bytes = 0;
    ssize_t got = 0;
    while ((got = recv(fd, buffer, sizeof(buffer), MSG_DONTWAIT)) > 0) {
      bytes += got;
    }
    most_bytes_ = std::max(most_bytes_, bytes);
    close(fd);
  }

  const AttackOptions options_;
  std::mt19937 random_;
  std::deque<int> recent_;
  int64_t streams_ = 0, closed_doors_ = 0, most_bytes_ = 0;
};

std::string Encode(const AttackOptions& options) {
  std::vector<std::string> targets;
  for (const AttackTarget& target : options.targets) {
    targets.push_back(absl::StrCat(target.address, ":", target.port));
  }
  return absl::StrJoin(
      {absl::StrCat(options.streams), absl::StrCat(options.held),
       absl::StrCat(options.user), absl::StrCat(options.seed),
       absl::BytesToHexString(options.sent),
       absl::BytesToHexString(options.got), absl::StrJoin(targets, ",")},
      " ");
}

AttackOptions Decode(const std::string& text) {
  const std::vector<std::string> words = absl::StrSplit(text, ' ');
  AttackOptions options;
  if (words.size() != 7 || !absl::SimpleAtoi(words[0], &options.streams) ||
      !absl::SimpleAtoi(words[1], &options.held) ||
      !absl::SimpleAtoi(words[2], &options.user) ||
      !absl::SimpleAtoi(words[3], &options.seed)) {
    _exit(1);
  }
  options.sent = absl::HexStringToBytes(words[4]);
  options.got = absl::HexStringToBytes(words[5]);
  for (const auto& target : absl::StrSplit(words[6], ',', absl::SkipEmpty())) {
    const std::vector<std::string> ends = absl::StrSplit(target, ':');
    options.targets.push_back({ends.at(0), ends.at(1)});
  }
  return options;
}

// The inodes of the sockets that `pid` has.
std::set<std::string> SocketsOf(pid_t pid) {
  std::set<std::string> sockets;
  const std::string folder = absl::StrCat("/proc/", pid, "/fd");
  DIR* const dir = opendir(folder.c_str());
  if (dir == nullptr) return sockets;
  while (const dirent* entry = readdir(dir)) {
    char target[64] = {};
    const std::string path = absl::StrCat(folder, "/", entry->d_name);
    if (readlink(path.c_str(), target, sizeof(target) - 1) > 0) {
      sockets.insert(target);
    }
  }
  closedir(dir);
  return sockets;
}

}  // namespace

std::vector<AttackTarget> ListeningAt(pid_t pid, const std::string& address) {
  const std::set<std::string> sockets = SocketsOf(pid);
  std::vector<AttackTarget> found;
  for (const char* family : {"tcp", "tcp6"}) {
    std::ifstream table(absl::StrCat("/proc/", pid, "/net/", family));
    for (std::string line; std::getline(table, line);) {
      const std::vector<std::string> words =
          absl::StrSplit(line, ' ', absl::SkipEmpty());
      if (words.size() < 10 || words[3] != "0A" ||
          sockets.count(absl::StrCat("socket:[", words[9], "]")) == 0) {
        continue;
      }
      const std::vector<std::string> local = absl::StrSplit(words[1], ':');
      uint32_t host = 0, port = 0;
      const bool v4 = std::string(family) == "tcp" &&
                      absl::SimpleHexAtoi(local[0], &host) && host != 0;
      if (!absl::SimpleHexAtoi(local[1], &port)) continue;
      char text[INET_ADDRSTRLEN] = {};
      inet_ntop(AF_INET, &host, text, sizeof(text));
      found.push_back({v4 ? text : address, absl::StrCat(port)});
    }
  }
  return found;
}

int64_t ResidentBytes(pid_t pid) {
  std::ifstream statm(absl::StrCat("/proc/", pid, "/statm"));
  int64_t size = 0, resident = 0;
  statm >> size >> resident;
  return resident * getpagesize();
}

Attack::Attack(const AttackOptions& options, Env env) {
  env.emplace_back(kAttack, Encode(options));
  process_ = std::make_unique<Process>(std::vector<std::string>{}, env);
}

bool Attack::WaitUntilUnderWay() { return process_->WaitForLines(1); }

AttackReport Attack::WaitUntilSent() {
  AttackReport report;
  if (!process_->WaitForLines(2)) {
    report.error = process_->Finish(absl::Seconds(1)).err;
    return report;
  }
  const std::vector<std::string> lines = absl::StrSplit(process_->out(), '\n');
  const std::vector<std::string> words = absl::StrSplit(lines[1], ' ');
  if (words.size() != 4 || !absl::SimpleAtoi(words[1], &report.streams) ||
      !absl::SimpleAtoi(words[2], &report.closed_doors) ||
      !absl::SimpleAtoi(words[3], &report.most_bytes)) {
    report.error = process_->out();
  }
  return report;
}

void Attack::ServeIfAttacker() {
  const char* const attack = getenv(kAttack);
  if (attack == nullptr) return;
  if (!TwoHosts::EnterIfTold()) _exit(1);
  _exit(Attacker(Decode(attack)).Run());
}

}  // namespace tessera
