// RunPlan says what a model needs on each rank at every stage, before anything
// is started (engine/plan/plan.h): `tessera plan`.
#ifndef TOOLS_PLAN_COMMAND_H_
#define TOOLS_PLAN_COMMAND_H_

#include <string>

#include "base/command/command_line.h"

namespace tessera {

// Runs PlanCommand (tools/separate_commands.h). Returns the exit status: 1 if
// the configuration is wrong or the model cannot be planned.
int RunPlan(CommandCall* call);

// Returns a note if other work makes measured rates too low: `load` processes
// have run on average in the last minute. Returns "" otherwise.
std::string BusyNote(double load, int processors);

}  // namespace tessera
#endif  // TOOLS_PLAN_COMMAND_H_
