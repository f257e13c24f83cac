#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "config/config.pb.h"
#include "engine/observe/flops_profile.h"

namespace tessera {
namespace {

using Rows = std::vector<std::pair<std::string, FlopCounts::Sum>>;

// "1.23 G"
std::string Short(double value) {
  const char* unit = "";
  for (const char* next : {"k", "M", "G", "T", "P"}) {
    if (value < 1000) break;
    value /= 1000;
    unit = next;
  }
  return absl::StrFormat("%.4g %s", value, unit);
}

// The first `depth` parts of a path; all below 0.
std::string Prefix(const std::string& path, int64_t depth) {
  const std::vector<std::string> parts = absl::StrSplit(path, '.');
  if (depth < 0 || static_cast<int64_t>(parts.size()) <= depth) return path;
  if (depth == 0) return "(all)";
  return absl::StrJoin(parts.begin(), parts.begin() + depth, ".");
}

Rows Units(const FlopCounts& counts, int64_t depth) {
  std::map<std::string, FlopCounts::Sum> added;
  for (const auto& [unit, sum] : counts.by_unit) {
    FlopCounts::Sum& to = added[Prefix(unit, depth)];
    to.calls += sum.calls;
    to.flops += sum.flops;
  }
  return Rows(added.begin(), added.end());
}

void SortByFlops(Rows* rows) {
  std::stable_sort(rows->begin(), rows->end(),
                   [](const auto& a, const auto& b) {
                     return a.second.flops > b.second.flops;
                   });
}

std::string Table(const char* what, const Rows& rows, int64_t total) {
  size_t width = 10;
  for (const auto& row : rows) width = std::max(width, row.first.size());
  std::string text = absl::StrFormat("%-*s %8s %12s %7s\n", width, what,
                                     "calls", "FLOPs", "share");
  for (const auto& [name, sum] : rows) {
    absl::StrAppendFormat(&text, "%-*s %8d %12s %5.1f %%\n", width, name,
                          sum.calls, Short(static_cast<double>(sum.flops)),
                          total == 0 ? 0
                                     : 100.0 * static_cast<double>(sum.flops) /
                                           static_cast<double>(total));
  }
  return text;
}

std::string Line(const char* what, const std::string& value) {
  return absl::StrFormat("%-44s %s\n", what, value);
}

}  // namespace

std::string FlopsTable(const FlopCounts& counts, double seconds,
                       const FlopsProfileContext& context,
                       const proto::FlopsProfiler& config) {
  const auto forward = static_cast<double>(counts.total());
  const double step = forward * (3 + config.recompute_fwd_factor()) *
                      static_cast<double>(context.micro_batches);
  Rows operators(counts.by_operator.begin(), counts.by_operator.end());
  Rows units = Units(counts, config.module_depth());
  SortByFlops(&operators);
  SortByFlops(&units);
  std::string text = absl::StrCat(
      "flops profiler: the first forward of step ", context.step,
      ", rank 0 of ", context.world_size, "\n",
      Line("parameters of the model",
           Short(static_cast<double>(context.parameters))),
      Line("samples of the forward", absl::StrCat(context.micro_batch_samples)),
      Line("forward FLOPs per rank", Short(forward)),
      Line("forward latency", absl::StrFormat("%.2f ms", 1000 * seconds)),
      Line(
          "forward FLOPS per rank",
          seconds > 0 ? absl::StrCat(Short(forward / seconds), "FLOP/s") : "-"),
      Line("FLOPs of a step per rank (3 forwards, and recomputation)",
           Short(step)));
  Rows top(
      units.begin(),
      units.begin() + std::min<int64_t>(config.top_modules(),
                                        static_cast<int64_t>(units.size())));
  absl::StrAppend(
      &text, "units with the most: ",
      absl::StrJoin(top, ", ",
                    [](std::string* out, const auto& row) {
                      absl::StrAppend(
                          out, row.first, " (",
                          Short(static_cast<double>(row.second.flops)), ")");
                    }),
      "\n", Table("operator", operators, counts.total()));
  if (!config.detailed()) return text;
  std::sort(units.begin(), units.end(),
            [](const auto& a, const auto& b) { return a.first < b.first; });
  return absl::StrCat(text, Table("unit", units, counts.total()));
}

}  // namespace tessera
