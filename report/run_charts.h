// Decides which series of a run belong in which chart.
#ifndef REPORT_RUN_CHARTS_H_
#define REPORT_RUN_CHARTS_H_

#include <string>
#include <vector>

#include "report/run_files.h"
#include "report/svg_chart.h"

namespace tessera {

struct ChartGroup {
  std::string title;
  std::vector<Chart> charts;
};

// Groups known series by what they show, and puts each other series in a chart
// of its own.
std::vector<ChartGroup> ChartsOf(const RunFiles& run);

// Returns the first of these series that exists; null if none does.
const std::vector<double>* FindSeries(const RunFiles& run,
                                      const std::vector<std::string>& names);

// These return NaN if no value is finite.
double MedianOf(const std::vector<double>& values);
double LargestOf(const std::vector<double>& values);
double LastOf(const std::vector<double>& values);

}  // namespace tessera
#endif  // REPORT_RUN_CHARTS_H_
