// Configurations that tell all there is to tell, and what they told.
#ifndef TESTS_OBSERVE_METRICS_LINES_H_
#define TESTS_OBSERVE_METRICS_LINES_H_

#include <map>
#include <string>
#include <vector>

namespace tessera {

// Protobuf text: metrics go to folder/run/metrics.jsonl.
std::string Jsonl(const std::string& folder);
// That, and every other monitor, log and profile.
std::string Everything(const std::string& folder);

// The lines of folder/run/metrics.jsonl: of each its numbers, and strings as
// NaN.
using Line = std::map<std::string, double>;
std::vector<Line> LinesOf(const std::string& folder);

}  // namespace tessera
#endif  // TESTS_OBSERVE_METRICS_LINES_H_
