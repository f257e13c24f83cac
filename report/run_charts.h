// Which series of a run belong into which chart.
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

// Known ones by what they say, then each of the others in one of its own.
std::vector<ChartGroup> ChartsOf(const RunFiles& run);

// The first of the names that there is; null if none is.
const std::vector<double>* FindSeries(const RunFiles& run,
                                      const std::vector<std::string>& names);

// NaN where there is nothing finite.
double MedianOf(const std::vector<double>& values);
double LargestOf(const std::vector<double>& values);
double LastOf(const std::vector<double>& values);

}  // namespace tessera
#endif  // REPORT_RUN_CHARTS_H_
