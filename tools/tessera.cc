// The command `tessera`: what it can do stands in config/command.cc,
// checkpoint/exchange/command.cc, report/command.cc, doctor.cc and
// separate_commands.cc.
#include <errno.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <iostream>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/command/command_line.h"
#include "checkpoint/exchange/command.h"
#include "config/command.h"
#include "engine/api/version.h"
#include "report/command.h"
#include "tools/doctor.h"
#include "tools/separate_commands.h"
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

// Options of PlanCommand and TokenizeCommand are checked here, and then handed
// over as they were given.
std::vector<tessera::Command> Commands(char** argv) {
  std::vector<tessera::Command> commands = tessera::ConfigCommands();
  commands.push_back(tessera::PlanCommand(
      [argv](tessera::CommandCall*) { return RunPlan(argv + 1); }));
  for (auto each : {tessera::CheckpointCommands, tessera::ReportCommands}) {
    for (tessera::Command& command : each()) {
      commands.push_back(std::move(command));
    }
  }
  commands.push_back(tessera::TokenizeCommand([argv](tessera::CommandCall*) {
    return RunBeside("tessera_tokenize", argv + 1);
  }));
  commands.push_back(tessera::DoctorCommand());
  return commands;
}

constexpr char kDescription[] =
    "Tessera trains modules of libtorch in shards over many ranks. This "
    "command needs no ranks: it checks configurations, reads checkpoints and "
    "the output of runs, and predicts memory. Options take a "
    "value as --option=value or --option value.";

// Returns the manual page, docs/tessera.1.
std::string ManualPage(const tessera::CommandLine& tool) {
  return absl::StrCat(
      ".\\\" Made by `tessera manual`.\n.TH TESSERA 1 \"\" \"Tessera ",
      tessera::kTesseraVersion,
      "\" \"User Commands\"\n.SH NAME\n"
      "tessera \\- check configurations, plan memory, manage checkpoints and "
      "runs\n",
      tool.ManualPage(kDescription),
      ".SH EXIT STATUS\n.TP\n.B 0\nSuccess, and no differences.\n"
      ".TP\n.B 1\nAn error or a fault, reported on standard error, or a "
      "difference.\n.TP\n.B 2\nWrong usage.\n"
      ".SH SEE ALSO\nThe pages in\n.I docs/\nof the source.\n");
}

}  // namespace

int main(int argc, char** argv) {
  std::vector<tessera::Command> commands = Commands(argv);
  // What is made of the table itself.
  commands.push_back(
      {"completion",
       "",
       "Prints a script that completes commands in bash and zsh.",
       "For bash, put it into the folder of completions; zsh reads it after "
       "`autoload bashcompinit && bashcompinit`.",
       {},
       {"completion > ~/.local/share/bash-completion/completions/tessera"},
       [&commands](tessera::CommandCall* call) {
         call->out() << tessera::CommandLine("tessera", commands).Completion();
         return 0;
       }});
  commands.push_back({"manual",
                      "",
                      "Prints the manual page, in troff.",
                      "",
                      {},
                      {"manual | man -l -"},
                      [&commands](tessera::CommandCall* call) {
                        call->out() << ManualPage(
                            tessera::CommandLine("tessera", commands));
                        return 0;
                      }});
  commands.push_back({"version",
                      "",
                      "Prints the version.",
                      "",
                      {},
                      {},
                      [](tessera::CommandCall* call) {
                        call->out()
                            << "tessera " << tessera::kTesseraVersion << "\n";
                        return 0;
                      }});
  std::vector<std::string> args(argv + 1, argv + argc);
  if (!args.empty() && args[0] == "--version") args[0] = "version";
  return tessera::Written(tessera::CommandLine("tessera", commands)
                              .Run(args, &std::cout, &std::cerr));
}
