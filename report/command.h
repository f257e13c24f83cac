// The commands `tessera trace ...` and `tessera report`, which show what a run
// has recorded.
#ifndef REPORT_COMMAND_H_
#define REPORT_COMMAND_H_

#include <vector>

#include "base/command/command_line.h"

namespace tessera {

// Their exit status: 0; 1 if a file is wrong; 2 for wrong words.
std::vector<Command> ReportCommands();

}  // namespace tessera
#endif  // REPORT_COMMAND_H_
