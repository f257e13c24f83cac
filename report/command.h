// `tessera trace` and `tessera report` show what a run has recorded.
#ifndef REPORT_COMMAND_H_
#define REPORT_COMMAND_H_

#include <ostream>
#include <string>
#include <vector>

namespace tessera {

// Run the commands. `args` are the words after the command's name. Both return
// the exit status: 0, 1 if a file is wrong, 2 if the command is wrong.
int RunTraceCommand(const std::vector<std::string>& args, std::ostream* out,
                    std::ostream* err);
int RunReportCommand(const std::vector<std::string>& args, std::ostream* out,
                     std::ostream* err);

}  // namespace tessera
#endif  // REPORT_COMMAND_H_
