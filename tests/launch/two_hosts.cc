#include "tests/launch/two_hosts.h"

#include <fcntl.h>
#include <sched.h>
#include <sys/mount.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/time.h"

namespace tessera {
namespace {

constexpr char kHelper[] = "TESSERA_TWO_HOSTS_HELPER";
constexpr char kHost[] = "TESSERA_TWO_HOSTS_HOST";  // process id of its holder

int Fail(const std::string& what) {
  std::fprintf(stderr, "%s: %s\n", what.c_str(), strerror(errno));
  return 1;
}

// Goes to the namespaces of `holder`.
bool Enter(const std::string& holder) {
  for (const char* kind : {"net", "uts", "mnt"}) {
    const int fd = open(absl::StrCat("/proc/", holder, "/ns/", kind).c_str(),
                        O_RDONLY | O_CLOEXEC);
    if (fd < 0 || setns(fd, 0) != 0) return false;
    close(fd);
  }
  return true;
}

// `argv` has the name and the path of its /etc/hosts. Says "here" and waits to
// be killed.
int HolderMain(int argc, char** argv) {
  if (argc != 3 || unshare(CLONE_NEWNET | CLONE_NEWUTS | CLONE_NEWNS) != 0) {
    return Fail("unshare");
  }
  if (sethostname(argv[1], strlen(argv[1])) != 0 ||
      mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0 ||
      mount(argv[2], "/etc/hosts", nullptr, MS_BIND, nullptr) != 0) {
    return Fail("host name, /etc/hosts");
  }
  if (write(STDOUT_FILENO, "here\n", 5) != 5) return Fail("write");
  while (true) pause();
}

// Runs ip with argv, in its host's network if it has one.
int IpMain(char** argv) {
  if (!TwoHosts::EnterIfTold()) return 1;
  for (const char* ip : {"/sbin/ip", "/usr/sbin/ip", "/bin/ip"}) {
    execv(ip, argv);
  }
  return Fail("ip (package iproute2)");
}

}  // namespace

TwoHosts::TwoHosts(const std::string& second_name, const std::string& folder) {
  const std::string path = absl::StrCat(folder, "/hosts.");
  // The name of a host leads to its own loopback, as Debian's installer has
  // it; the other's to the cable.
  if (!Start("alpha", path + "0",
             absl::StrCat("127.0.0.1 localhost\n127.0.1.1 alpha\n",
                          kAddresses[1], " beta\n")) ||
      !Start(second_name, path + "1",
             absl::StrCat("127.0.0.1 localhost\n127.0.1.1 beta\n",
                          kAddresses[0], " alpha\n")) ||
      !Ip(absl::StrCat("link add cable netns ", holders_[0]->pid(),
                       " type veth peer name cable netns ",
                       holders_[1]->pid()))) {
    return;
  }
  for (int host = 0; host < 2; ++host) {
    const std::string commands = absl::StrCat(path, host, ".ip");
    std::ofstream(commands) << "link set lo up\naddr add " << kAddresses[host]
                            << "/24 dev cable\nlink set cable up\n";
    if (!Ip(absl::StrCat("-batch ", commands), host)) return;
  }
}

bool TwoHosts::Start(const std::string& name, const std::string& path,
                     const std::string& hosts) {
  std::ofstream(path) << hosts;
  holders_.push_back(std::make_unique<Process>(
      std::vector<std::string>{name, path}, Env{{kHelper, "holder"}}));
  if (holders_.back()->WaitForLines(1)) return true;
  trouble_ = absl::StrCat("namespaces need root: ",
                          holders_.back()->Finish(absl::Seconds(1)).err);
  return false;
}

bool TwoHosts::Ip(const std::string& arguments, int host) {
  Env env = {{kHelper, "ip"}};
  if (host >= 0) env.push_back(Place(host));
  const Finished run =
      Process(absl::StrSplit(arguments, ' '), env).Finish(absl::Seconds(20));
  if (run.code == 0) return true;
  trouble_ = absl::StrCat("ip ", arguments, ": ", run.err);
  return false;
}

bool TwoHosts::SetCable(int host, bool up) {
  return Ip(absl::StrCat("link set cable ", up ? "up" : "down"), host);
}

std::pair<std::string, std::string> TwoHosts::Place(int host) const {
  return {kHost, absl::StrCat(holders_[host]->pid())};
}

bool TwoHosts::EnterIfTold() {
  const char* const holder = getenv(kHost);
  if (holder == nullptr || Enter(holder)) return true;
  Fail("setns");
  return false;
}

void TwoHosts::ServeIfHelper(int argc, char** argv) {
  const char* const helper = getenv(kHelper);
  if (helper == nullptr) return;
  _exit(std::string(helper) == "ip" ? IpMain(argv) : HolderMain(argc, argv));
}

}  // namespace tessera
