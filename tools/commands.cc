#include "tools/commands.h"

#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "checkpoint/exchange/command.h"
#include "config/command.h"
#include "engine/api/version.h"
#include "report/command.h"
#include "tools/doctor.h"
#include "tools/separate_commands.h"

namespace tessera {
namespace {

constexpr char kDescription[] =
    "Tessera trains modules of libtorch in shards over many ranks. This "
    "command needs no ranks: it checks configurations, reads checkpoints and "
    "the output of runs, and predicts memory. Options take a "
    "value as --option=value or --option value.";

// Returns the manual page, docs/tessera.1.
std::string ManualPage(const CommandLine& tool) {
  return absl::StrCat(
      ".\\\" Made by `tessera manual`.\n.TH TESSERA 1 \"\" \"Tessera ",
      kTesseraVersion,
      "\" \"User Commands\"\n.SH NAME\n"
      "tessera \\- check configurations, plan memory, manage checkpoints and "
      "runs\n",
      tool.ManualPage(kDescription),
      ".SH EXIT STATUS\n.TP\n.B 0\nSuccess, and no differences.\n"
      ".TP\n.B 1\nAn error or a fault, reported on standard error, or a "
      "difference.\n.TP\n.B 2\nWrong usage.\n"
      ".SH SEE ALSO\nThe pages in\n.I docs/\nof the source.\n");
}

// Adds what is made of the table itself.
void AddCommandsOfTheTable(const SeparateRuns& runs,
                           std::vector<Command>* commands) {
  const auto tool = [runs] {
    return CommandLine("tessera", TesseraCommands(runs));
  };
  commands->push_back(
      {"completion",
       "",
       "Prints a script that completes commands in bash and zsh.",
       "For bash, put it into the folder of completions; zsh reads it after "
       "`autoload bashcompinit && bashcompinit`.",
       {},
       {"completion > ~/.local/share/bash-completion/completions/tessera"},
       [tool](CommandCall* call) {
         call->out() << tool().Completion();
         return 0;
       }});
  commands->push_back({"manual",
                       "",
                       "Prints the manual page, in troff.",
                       "",
                       {},
                       {"manual | man -l -"},
                       [tool](CommandCall* call) {
                         call->out() << ManualPage(tool());
                         return 0;
                       }});
  commands->push_back({"version",
                       "",
                       "Prints the version.",
                       "",
                       {},
                       {"version"},
                       [](CommandCall* call) {
                         call->out() << "tessera " << kTesseraVersion << "\n";
                         return 0;
                       }});
}

}  // namespace

std::vector<Command> TesseraCommands(const SeparateRuns& runs) {
  std::vector<Command> commands = ConfigCommands();
  commands.push_back(PlanCommand(runs.plan));
  for (auto each : {CheckpointCommands, ReportCommands}) {
    for (Command& command : each()) commands.push_back(std::move(command));
  }
  commands.push_back(TokenizeCommand(runs.tokenize));
  commands.push_back(DoctorCommand());
  AddCommandsOfTheTable(runs, &commands);
  return commands;
}

}  // namespace tessera
