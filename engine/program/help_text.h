// What --help of a program that calls Start prints.
#ifndef ENGINE_PROGRAM_HELP_TEXT_H_
#define ENGINE_PROGRAM_HELP_TEXT_H_

#include <string>
#include <vector>

#include "absl/flags/commandlineflag.h"
#include "absl/strings/string_view.h"
#include "engine/program/start.h"

namespace tessera {

// Returns absl's flags that are defined in the folder of `file`, by name; with
// "" those of all files. absl's own are left out.
std::vector<const absl::CommandLineFlag*> FlagsOf(absl::string_view file);

// Returns whether absl itself defines the flag (--flagfile).
bool IsOfAbsl(const absl::CommandLineFlag& flag);

// `file`: as in FlagsOf.
std::string HelpText(absl::string_view program, const StartOptions& options,
                     absl::string_view file);

}  // namespace tessera
#endif  // ENGINE_PROGRAM_HELP_TEXT_H_
