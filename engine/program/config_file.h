// Finds the file of a configuration, and other files of a program.
#ifndef ENGINE_PROGRAM_CONFIG_FILE_H_
#define ENGINE_PROGRAM_CONFIG_FILE_H_

#include <string>

#include "absl/status/statusor.h"

namespace tessera {

// Returns the first of these that exists, for a relative `path`: it in the
// current folder; it, and then its last part, in the folder of `program` (the
// path of the running program); it among the data files that Bazel puts beside
// `program`. An absolute path is itself. Returns NotFound with all places.
// LOCAL.
absl::StatusOr<std::string> FindConfigFile(const std::string& path,
                                           const std::string& program);

// As FindConfigFile, for a file or folder that is the value of --`flag`. LOCAL.
absl::StatusOr<std::string> FindProgramFile(const std::string& path,
                                            const std::string& program,
                                            const std::string& flag);

// Returns the path of this process's program, links resolved; "" where the
// system does not say.
std::string RunningProgram();

}  // namespace tessera
#endif  // ENGINE_PROGRAM_CONFIG_FILE_H_
