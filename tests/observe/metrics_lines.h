// Makes configurations that report everything, and reads what they report.
#ifndef TESTS_OBSERVE_METRICS_LINES_H_
#define TESTS_OBSERVE_METRICS_LINES_H_

#include <map>
#include <string>
#include <vector>

namespace tessera {

// Returns protobuf text: metrics go to folder/run/metrics.jsonl.
std::string Jsonl(const std::string& folder);
// Returns Jsonl's text, and every other monitor, log and profile.
std::string Everything(const std::string& folder);

// Reads the lines of folder/run/metrics.jsonl: the numbers of each, with
// strings as NaN.
using Line = std::map<std::string, double>;
std::vector<Line> LinesOf(const std::string& folder);

}  // namespace tessera
#endif  // TESTS_OBSERVE_METRICS_LINES_H_
