// `tessera plan` says what a model needs on each rank at every stage, before
// anything is started (engine/plan/plan.h).
#ifndef TOOLS_PLAN_COMMAND_H_
#define TOOLS_PLAN_COMMAND_H_

#include <ostream>
#include <string>
#include <vector>

namespace tessera {

// Runs the command. `args` are the words after `tessera plan`. Returns the exit
// status: 0, 1 if the configuration is wrong or the model cannot be planned, 2
// if the command is wrong.
int RunPlanCommand(const std::vector<std::string>& args, std::ostream* out,
                   std::ostream* err);

}  // namespace tessera
#endif  // TOOLS_PLAN_COMMAND_H_
