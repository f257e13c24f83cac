// Helps programs that take turns with others (benchmarks/peers). Every rank is
// started by itself, prints a line of JSON when libtorch is loaded, then reads
// lines from its standard input, one to begin and one for each turn, and prints
// a line after each.
#ifndef BENCHMARKS_TURNS_H_
#define BENCHMARKS_TURNS_H_

#include <iostream>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/flags/parse.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/escaping.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "comm/launch/job.h"

namespace tessera {

// Reads the flags, before Init needs that of the backend, and returns the words
// that absl has left over. absl does not know Init's flags, so it gets a copy
// without them; Init finds them in argv. `turns` is the program's flag of that
// name.
inline absl::StatusOr<std::vector<char*>> ReadTurnFlags(
    int argc, char** argv, const absl::Flag<bool>& turns) {
  std::vector<char*> rest(argv, argv + argc + 1);
  TESSERA_ASSIGN_OR_RETURN(const JobFlags job,
                           TakeJobFlags(&argc, rest.data()));
  std::vector<char*> words = absl::ParseCommandLine(argc, rest.data());
  if (absl::GetFlag(turns) && job.world.has_value()) {
    return absl::InvalidArgumentError(
        "--turns: the ranks that --world starts have one standard input; start "
        "each by itself, with RANK and WORLD_SIZE set");
  }
  return words;
}

// Returns the next line of standard input; nullopt at its end.
inline std::optional<std::string> NextLine() {
  std::string line;
  if (!std::getline(std::cin, line)) return std::nullopt;
  return line;
}

// Returns the number in the next line of standard input; nullopt at its end.
inline absl::StatusOr<std::optional<int>> NextTurn() {
  const std::optional<std::string> line = NextLine();
  if (!line.has_value()) return std::nullopt;
  int steps = 0;
  if (!absl::SimpleAtoi(*line, &steps) || steps < 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "--turns: expected a number of steps on standard input, got '",
        absl::CEscape(*line), "'"));
  }
  return steps;
}

}  // namespace tessera
#endif  // BENCHMARKS_TURNS_H_
