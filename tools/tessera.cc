// This is the command `tessera`; see kUsage in config/command.cc,
// checkpoint/exchange/command.cc and report/command.cc. `tessera plan`
// (tools/plan_command.cc) and `tessera tokenize` are separate programs beside
// this one: this program does not need libtorch, and tokenize must do without
// protobuf.
#include <errno.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <iostream>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/exchange/command.h"
#include "config/command.h"
#include "report/command.h"
#include "tools/written.h"

namespace {

constexpr int kNoLibrary = 127;  // how the dynamic linker ends a program

// Executes the program of that name beside this one.
int RunBeside(const std::string& name, char** argv) {
  std::string path(4096, '\0');
  const ssize_t length = readlink("/proc/self/exe", path.data(), path.size());
  path.resize(length < 0 ? 0 : static_cast<size_t>(length));
  path = path.substr(0, path.rfind('/') + 1) + name;
  execv(path.c_str(), argv);
  std::cerr << path << ": " << std::strerror(errno)
            << " (build it: bazel build //tools:" << name << ")\n";
  return 2;
}

// Runs it as a child, whose exit says whether its libraries were found.
int RunPlan(char** argv) {
  const pid_t child = fork();
  if (child < 0) {
    std::cerr << "tessera plan: fork: " << std::strerror(errno) << "\n";
    return 2;
  }
  if (child == 0) {
    prctl(PR_SET_PDEATHSIG, SIGTERM);
    _exit(RunBeside("tessera_plan", argv));
  }
  int status = 0;
  while (waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  if (WIFSIGNALED(status)) {  // so that a shell reports it for this process
    signal(WTERMSIG(status), SIG_DFL);
    raise(WTERMSIG(status));
    return 128 + WTERMSIG(status);  // the signal is blocked here
  }
  if (WEXITSTATUS(status) == kNoLibrary) {
    std::cerr << "tessera plan: libtorch 2.11 is found by LD_LIBRARY_PATH: set "
                 "it to the folder of libtorch_cpu.so, which is lib/ of the "
                 "Python package torch (site-packages/torch/lib)\n";
  }
  return WEXITSTATUS(status);
}

using Command = int (*)(const std::vector<std::string>& args, std::ostream* out,
                        std::ostream* err);

// The commands of this program.
constexpr std::pair<const char*, Command> kCommands[] = {
    {"config", tessera::RunConfigCommand},
    {"checkpoint", tessera::RunCheckpointCommand},
    {"trace", tessera::RunTraceCommand},
    {"report", tessera::RunReportCommand}};

bool IsHelp(const std::string& word) {
  return word == "help" || word == "--help";
}

}  // namespace

int main(int argc, char** argv) {
  std::vector<std::string> args(argv + 1, argv + argc);
  const std::string command = args.empty() ? "" : args[0];
  if (!args.empty()) args.erase(args.begin());
  for (const auto& [name, run] : kCommands) {
    if (command != name) continue;
    if (args.empty() || !IsHelp(args[0])) {
      return tessera::Written(run(args, &std::cout, &std::cerr));
    }
    run({}, &std::cout, &std::cout);  // prints its usage
    return tessera::Written(0);
  }
  if (command == "plan") return RunPlan(argv + 1);
  if (command == "tokenize") return RunBeside("tessera_tokenize", argv + 1);
  std::ostream& out = IsHelp(command) ? std::cout : std::cerr;
  out << "tessera knows six commands: tessera config, tessera checkpoint, "
         "tessera trace, tessera report, tessera plan (tessera plan --help), "
         "tessera tokenize (tessera tokenize --help)\n";
  std::string last;
  for (const auto& [name, run] : kCommands) {
    std::ostringstream usage;
    run({}, &usage, &usage);
    // Two of them have the same text.
    if (usage.str() != last) out << usage.str();
    last = usage.str();
  }
  return tessera::Written(IsHelp(command) ? 0 : 2);
}
