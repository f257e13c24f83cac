// `tessera plan` is a separate program: it is the only command that needs
// libtorch.
#include <iostream>
#include <string>
#include <vector>

#include "base/command/command_line.h"
#include "base/command/command_terminal.h"
#include "tools/plan_command.h"
#include "tools/separate_commands.h"
#include "tools/written.h"

int main(int argc, char** argv) {
  const tessera::CommandLine tool("tessera",
                                  {tessera::PlanCommand(tessera::RunPlan)});
  std::vector<std::string> args(argv + 1, argv + argc);
  args.insert(args.begin(), "plan");
  return tessera::Written(
      tool.Run(args, &std::cout, &std::cerr, tessera::StandardTerminal()));
}
