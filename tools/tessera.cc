// The command `tessera`: what it can do stands in commands.h.
#include <errno.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <iostream>
#include <string>
#include <vector>

#include "base/command/command_line.h"
#include "base/command/command_terminal.h"
#include "tools/commands.h"
#include "tools/separate_commands.h"
#include "tools/written.h"

namespace {

constexpr int kNoLibrary = 127;  // how the dynamic linker ends a program

// Executes a command's own program.
int RunProgram(const std::string& name, char** argv) {
  std::string self(4096, '\0');
  const ssize_t length = readlink("/proc/self/exe", self.data(), self.size());
  self.resize(length < 0 ? 0 : static_cast<size_t>(length));
  const std::string folder = self.substr(0, self.rfind('/'));
  const std::string path = tessera::FindProgram(folder, name);
  if (path.empty()) {
    std::cerr << tessera::NoProgram(folder, name) << "\n";
    return 1;
  }
  execv(path.c_str(), argv);
  std::cerr << path << ": " << std::strerror(errno) << "\n";
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
    _exit(RunProgram("tessera_plan", argv));
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

}  // namespace

int main(int argc, char** argv) {
  // Options of these two are checked here, and then handed over as they were
  // given.
  const tessera::CommandLine tool(
      "tessera",
      tessera::TesseraCommands(
          {[argv](tessera::CommandCall*) { return RunPlan(argv + 1); },
           [argv](tessera::CommandCall*) {
             return RunProgram("tessera_tokenize", argv + 1);
           }}));
  std::vector<std::string> args(argv + 1, argv + argc);
  if (!args.empty() && args[0] == "--version") args[0] = "version";
  return tessera::Written(
      tool.Run(args, &std::cout, &std::cerr, tessera::StandardTerminal()));
}
