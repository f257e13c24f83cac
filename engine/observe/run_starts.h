// The starts in run.json: which processes have trained into a run's folder, on
// how many ranks, and how each of them ended. A start that has no end was
// killed, or is still there.
//
//   "starts": [{"time": ..., "world_size": 2, "stage": 3,
//               "end": "closed", "end_time": ..., "step": 140},
//              {"time": ..., "world_size": 3, "stage": 3}]
#ifndef ENGINE_OBSERVE_RUN_STARTS_H_
#define ENGINE_OBSERVE_RUN_STARTS_H_

#include <cstdint>
#include <string>

#include "absl/strings/string_view.h"

namespace tessera {

struct RunStart {
  double unix_seconds = 0;
  int world_size = 1;
  int stage = 0;
};

struct RunEnd {
  // "closed": Engine::Close; "ended": the engine was destroyed without it;
  // "failed": destroyed after an error, or by an exception.
  absl::string_view how;
  double unix_seconds = 0;
  int64_t step = 0;
};

// Returns the list, without its key: the starts in `earlier`, the text of the
// run.json that was there ("" or damaged: none), and `start`.
std::string StartsJson(absl::string_view earlier, const RunStart& start);

// Returns `run_json` with the end of `start`; "" if it has no such start, since
// another process has written it.
std::string WithEnd(absl::string_view run_json, const RunStart& start,
                    const RunEnd& end);

// Returns the words of /proc/self/cmdline, for people: those with other than
// plain characters are in quotes. "***" stands for values of flags whose names
// end in key, token, secret, password, passphrase or credentials (--api_key=x,
// --token x, --set comet.api_key=x).
std::string CommandText(absl::string_view cmdline);

}  // namespace tessera
#endif  // ENGINE_OBSERVE_RUN_STARTS_H_
