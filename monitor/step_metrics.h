// StepMetrics is what all writers write of one optimizer step.
#ifndef MONITOR_STEP_METRICS_H_
#define MONITOR_STEP_METRICS_H_

#include <cstdint>
#include <string>
#include <vector>

namespace tessera {

// Histogram shows how values are distributed, in TensorBoard's form
// (HistogramOf in monitor/histogram.h makes one).
struct Histogram {
  double min = 0, max = 0, sum = 0, sum_squares = 0;
  int64_t count = 0;       // of finite values
  int64_t not_finite = 0;  // left out of all other fields
  // Bucket i counts the values in (limits[i - 1], limits[i]]; the last limit is
  // `max`. Empty without values.
  std::vector<double> limits;
  std::vector<int64_t> counts;
};

struct StepMetrics {
  // A number has two names: a short one for files with an object per step
  // ("loss"), and a path for files with a series per number, as DeepSpeed names
  // them ("Train/Samples/train_loss").
  struct Scalar {
    std::string name, tag;
    double value = 0;  // may be NaN or infinite
  };
  // A text under the name `tag`.
  struct Text {
    std::string tag, text;  // text: UTF-8
  };
  // A histogram under the name `tag`.
  struct Values {
    std::string tag;
    Histogram histogram;
  };

  int64_t step = 0;     // optimizer steps done so far, as Engine::step()
  int64_t samples = 0;  // of all ranks so far, including those of skipped steps
  double unix_seconds = 0;  // when the step ended
  std::vector<Scalar> scalars;
  std::vector<Text> texts;
  std::vector<Values> histograms;
};

}  // namespace tessera
#endif  // MONITOR_STEP_METRICS_H_
