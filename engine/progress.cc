#include "engine/progress.h"

#include <cstddef>
#include <limits>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/status.h"
#include "base/torch/torch_scope.h"
#include "base/torch_guard.h"
#include "comm/all_gather_values.h"
#include "comm/communicator.h"
#include "config/config.pb.h"
#include "engine/engine.h"
#include "engine/observe/monitor.h"

namespace tessera {
namespace {

constexpr int64_t kExchangeEach = 10;  // steps

struct Losses {
  double sum = 0;
  int64_t count = 0;  // -1: they could not be read
};

ProgressBarOptions BarOptions(const Engine& engine,
                              const ProgressOptions& options) {
  ProgressBarOptions bar;
  bar.line_each = options.line_each > 0 ? options.line_each
                                        : engine.config().steps_per_print();
  bar.clock = options.clock;
  return bar;
}

}  // namespace

Progress::Progress(Engine* engine, ProgressOptions options)
    : engine_(engine),
      clock_(options.clock),
      bar_(engine->communicator()->rank() == 0 ? options.out : nullptr,
           options.steps, BarOptions(*engine, options)),
      updates_(engine->updates()),
      begin_(clock_()),
      loss_(std::numeric_limits<double>::quiet_NaN()) {}

bool Progress::IsDue() const {
  const int64_t step = engine_->step_at_most();
  return first_updates_ == 0 || bar_.IsDue(step) || step % kExchangeEach == 0;
}

absl::Status Progress::Show(const at::Tensor& loss, absl::string_view words) {
  Add(loss);
  const int64_t updates = engine_->updates();
  if (updates == updates_) return absl::OkStatus();  // the step has not ended
  // A skipped step has the number of the one before it.
  const int64_t step = engine_->step_at_most();
  const bool skipped = step == std::exchange(step_, step);
  const bool due = skipped ? updates % kExchangeEach == 0 : IsDue();
  EndStep(updates);
  absl::Status status;
  if (due) status = Exchange();
  sum_ = at::Tensor();
  losses_ = 0;
  TESSERA_RETURN_IF_ERROR(status);
  if (due || !skipped) {
    bar_.Show(step, absl::StrCat(text_, words.empty() ? "" : "  ", words));
  }
  return absl::OkStatus();
}

// An error is told with the next exchange, since the other ranks wait there.
void Progress::Add(const at::Tensor& loss) {
  if (!loss.defined()) return;
  ++losses_;
  unread_.Update(CatchTorch("Progress", [&] {
    TorchScope scope;
    const at::Tensor one = loss.detach().to(at::kDouble).reshape({});
    sum_ = sum_.defined() ? sum_.add(one) : one;
  }));
}

void Progress::EndStep(int64_t updates) {
  const absl::Duration now = clock_();
  const bool first = first_updates_ == 0;
  const int64_t steps = first ? 1 : updates - first_updates_;
  const double seconds =
      absl::ToDoubleSeconds(now - (first ? begin_ : first_end_));
  const auto samples =
      static_cast<double>(steps * engine_->config().train_batch_size());
  if (seconds > 0) samples_per_second_ = samples / seconds;
  if (first) {
    first_updates_ = updates;
    first_end_ = now;
  }
  updates_ = updates;
}

absl::Status Progress::Exchange() {
  Losses mine;
  mine.count = losses_;
  if (unread_.ok() && sum_.defined()) {
    unread_.Update(CatchTorch("Progress", [&] {
      TorchScope scope;
      mine.sum = sum_.item<double>();
    }));
  }
  if (!unread_.ok()) mine.count = -1;
  TESSERA_ASSIGN_OR_RETURN(const std::vector<Losses> all,
                           AllGatherValue(engine_->communicator().get(), mine,
                                          {"the loss of all ranks"}));
  Losses whole;
  for (size_t r = 0; r < all.size(); ++r) {
    if (all[r].count < 0) {
      return absl::InvalidArgumentError(absl::StrCat(
          "Progress: the loss of rank ", r,
          " cannot be read; expected a tensor of one number",
          unread_.ok() ? "" : absl::StrCat(": ", unread_.message())));
    }
    whole.sum += all[r].sum;
    whole.count += all[r].count;
  }
  loss_ = whole.count > 0 ? whole.sum / static_cast<double>(whole.count)
                          : std::numeric_limits<double>::quiet_NaN();
  text_ = absl::StrFormat("loss %.4f", loss_);
  const StepReport& report = engine_->last_step();
  if (!report.groups.empty()) {
    absl::StrAppendFormat(&text_, "  lr %.3g", report.learning_rate);
  }
  absl::StrAppend(&text_, Speed());
  if (report.skipped_steps > 0) {
    absl::StrAppend(&text_, "  ", report.skipped_steps, " skipped");
  }
  return absl::OkStatus();
}

double Progress::tokens_per_second() const {
  return static_cast<double>(engine_->monitor().tokens_per_sample()) *
         samples_per_second_;
}

// The operations of a token are those of StepObserver: 6 for each parameter.
std::string Progress::Speed() const {
  if (samples_per_second_ <= 0) return "";
  const double tokens = tokens_per_second();
  if (tokens <= 0) {
    return absl::StrFormat("  %.1f samples/s", samples_per_second_);
  }
  std::string text = absl::StrFormat("  %.0f tok/s", tokens);
  const Monitor& monitor = engine_->monitor();
  if (monitor.peak_flops() > 0) {
    const double flops = 6 * static_cast<double>(monitor.parameters()) *
                         tokens / engine_->communicator()->world_size();
    absl::StrAppendFormat(&text, "  mfu %.1f %%",
                          100 * flops / monitor.peak_flops());
  }
  return text;
}

}  // namespace tessera
