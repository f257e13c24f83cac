#include "engine/program/config_file.h"

#include <filesystem>
#include <system_error>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

// Pipes are configurations, too; a folder is none.
bool IsThere(const fs::path& path, bool folders) {
  std::error_code error;
  const fs::file_status status = fs::status(path, error);
  return fs::exists(status) && (folders || !fs::is_directory(status));
}

// Bazel's data files: PROGRAM.runfiles/WORKSPACE/path.
std::vector<fs::path> InRunfiles(const fs::path& path,
                                 const std::string& program, bool folders) {
  std::vector<fs::path> found;
  std::error_code error;
  for (const fs::directory_entry& workspace :
       fs::directory_iterator(program + ".runfiles", error)) {
    if (IsThere(workspace.path() / path, folders)) {
      found.push_back(workspace.path() / path);
    }
  }
  return found;
}

// `what` and `flag` are for the message.
absl::StatusOr<std::string> FindFile(const std::string& path,
                                     const std::string& program, bool folders,
                                     absl::string_view what,
                                     absl::string_view flag) {
  const fs::path relative(path);
  if (path.empty() || IsThere(relative, folders)) return path;
  std::error_code error;
  std::vector<fs::path> places = {fs::current_path(error) / relative};
  if (relative.is_relative() && !program.empty()) {
    const fs::path folder = fs::path(program).parent_path();
    places.push_back(folder / relative);
    if (relative.has_parent_path()) {
      places.push_back(folder / relative.filename());
    }
    for (const fs::path& each : InRunfiles(relative, program, folders)) {
      places.push_back(each);
    }
  }
  for (const fs::path& place : places) {
    if (IsThere(place, folders)) return place.string();
  }
  return absl::NotFoundError(absl::StrCat(
      "no ", what, " '", path, "'; looked for ",
      absl::StrJoin(places, ", ",
                    [](std::string* out, const fs::path& place) {
                      absl::StrAppend(out, place.string());
                    }),
      "; give ", folders ? "its path" : "the file", " with --", flag));
}

}  // namespace

absl::StatusOr<std::string> FindConfigFile(const std::string& path,
                                           const std::string& program) {
  return FindFile(path, program, /*folders=*/false, "configuration", "config");
}

absl::StatusOr<std::string> FindProgramFile(const std::string& path,
                                            const std::string& program,
                                            const std::string& flag) {
  return FindFile(path, program, /*folders=*/true, "file or folder", flag);
}

std::string RunningProgram() {
  std::error_code error;
  return fs::read_symlink("/proc/self/exe", error).string();
}

}  // namespace tessera
