// BestMetric: the best of the metrics that a run reports, and how many reports
// in a row were no better.
//
// Threads: the caller serializes the calls. LOCAL throughout.
#ifndef ENGINE_RUN_BEST_METRIC_H_
#define ENGINE_RUN_BEST_METRIC_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace tessera {

struct BestMetricOptions {
  bool larger_is_better = false;
  // How much better than the best a metric has to be; at least 0.
  double min_delta = 0;
};

class BestMetric {
 public:
  explicit BestMetric(const BestMetricOptions& options) : options_(options) {}

  // Takes the metric of a step; returns whether it is the best so far. NaN
  // never is.
  bool Report(double metric, int64_t step);

  bool any() const { return step_ >= 0; }  // whether there is a best
  double value() const { return value_; }
  int64_t step() const { return step_; }
  // Reports in a row that were no better.
  int64_t not_better() const { return not_better_; }

  // Returns "best=0x1.8p+1 step=120 not_better=2"; "" before a report.
  std::string State() const;
  // Goes on from what State returned. DataLoss for other text, after which
  // nothing has changed.
  absl::Status Load(absl::string_view state);

 private:
  const BestMetricOptions options_;
  double value_ = 0;
  int64_t step_ = -1;
  int64_t not_better_ = 0;
};

}  // namespace tessera
#endif  // ENGINE_RUN_BEST_METRIC_H_
