#include "engine/observe/print_lines.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"

namespace tessera {

void PrintInterval::Add(const StepTimes& step, int64_t batch) {
  ++steps;
  samples += batch;
  times.step += step.step;
  times.forward += step.forward;
  times.backward += step.backward;
  times.autograd += step.autograd;
  times.update += step.update;
}

std::string ProgressLine(const StepRecord& record,
                         const PrintInterval& interval, bool speed) {
  std::string line = absl::StrCat(
      "step=", record.step, ", skipped=", record.skipped_steps, ", lr=[",
      absl::StrJoin(record.groups, ", ",
                    [](std::string* out, const StepRecord::Group& group) {
                      absl::StrAppend(out, group.learning_rate);
                    }),
      "], loss=", absl::StrFormat("%.6g", record.loss));
  if (!std::isnan(record.grad_norm)) {
    absl::StrAppendFormat(&line, ", grad_norm=%.4g", record.grad_norm);
  }
  if (record.has_loss_scale) {
    absl::StrAppend(&line, ", loss_scale=", record.loss_scale);
  }
  const double seconds = interval.times.step;
  if (!speed || seconds <= 0) return line;
  absl::StrAppendFormat(&line, ", %.1f ms a step, %.1f samples/s",
                        1000 * seconds / static_cast<double>(interval.steps),
                        static_cast<double>(interval.samples) / seconds);
  if (interval.tokens > 0) {
    absl::StrAppendFormat(&line, ", %.0f tokens/s", interval.tokens / seconds);
  }
  if (!std::isnan(record.tflops)) {
    absl::StrAppendFormat(&line, ", %.3g TFLOP/s a rank", record.tflops);
  }
  if (!std::isnan(record.mfu)) {
    absl::StrAppendFormat(&line, ", mfu %.1f %%", 100 * record.mfu);
  }
  absl::StrAppend(&line, ", peak ", BytesText(record.peak_bytes));
  return line;
}

std::string BreakdownLine(const PrintInterval& interval) {
  const StepTimes& sum = interval.times;
  const double scale =
      1000 / static_cast<double>(std::max<int64_t>(1, interval.steps));
  const double rest =
      std::max(0.0, sum.step - sum.forward - sum.backward - sum.update);
  return absl::StrFormat(
      "time (ms) | step: %.2f | fwd: %.2f | bwd: %.2f | bwd_inner: %.2f | "
      "bwd_allreduce: %.2f | update: %.2f | other: %.2f",
      scale * sum.step, scale * sum.forward, scale * sum.backward,
      scale * sum.autograd, scale * (sum.backward - sum.autograd),
      scale * sum.update, scale * rest);
}

}  // namespace tessera
