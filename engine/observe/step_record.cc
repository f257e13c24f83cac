#include "engine/observe/step_record.h"

#include <algorithm>
#include <cmath>
#include <cstddef>

#include "absl/strings/str_cat.h"

namespace tessera {
namespace {

// Calls `f` with each member of RankMetrics that is sent, in order.
template <typename Metrics, typename F>
void ForEachValue(Metrics& m, const F& f) {
  for (auto* const value :
       {&m.loss_sum, &m.loss_weight, &m.times.step, &m.times.forward,
        &m.times.backward, &m.times.autograd, &m.times.update, &m.tokens,
        &m.peak_bytes, &m.data_wait, &m.exposed_comm}) {
    f(*value);
  }
  for (auto& bytes : m.at_peak.by_kind) f(bytes);
}

StepRecord::Extremes ExtremesOf(absl::Span<const RankMetrics> ranks,
                                double StepTimes::*field) {
  StepRecord::Extremes found;
  found.most = found.least = ranks[0].times.*field;
  for (size_t r = 1; r < ranks.size(); ++r) {
    const double value = ranks[r].times.*field;
    if (value > found.most) {
      found.most = value;
      found.slowest = static_cast<int>(r);
    }
    if (value < found.least) {
      found.least = value;
      found.fastest = static_cast<int>(r);
    }
  }
  return found;
}

// The larger one; unknown only if both are.
double MostKnown(double a, double b) {
  if (std::isnan(a)) return b;
  return std::isnan(b) ? a : std::max(a, b);
}

class Scalars {
 public:
  explicit Scalars(StepMetrics* metrics) : metrics_(metrics) {}
  void Add(std::string name, std::string tag, double value) {
    metrics_->scalars.push_back({std::move(name), std::move(tag), value});
  }
  void AddKnown(std::string name, std::string tag, double value) {
    if (!std::isnan(value)) Add(std::move(name), std::move(tag), value);
  }

 private:
  StepMetrics* const metrics_;
};

void AddSpeed(const StepRecord& record, Scalars* to) {
  const auto ms = [&](const char* name, const char* tag, double seconds) {
    to->AddKnown(name, tag, 1000 * seconds);
  };
  const StepTimes& times = record.times;
  ms("step_ms", "Train/Speed/step_ms", times.step);
  ms("forward_ms", "Train/Samples/elapsed_time_ms_forward", times.forward);
  ms("backward_ms", "Train/Samples/elapsed_time_ms_backward", times.backward);
  ms("backward_inner_ms", "Train/Samples/elapsed_time_ms_backward_inner",
     times.autograd);
  ms("backward_allreduce_ms",
     "Train/Samples/elapsed_time_ms_backward_allreduce",
     times.backward - times.autograd);
  ms("update_ms", "Train/Samples/elapsed_time_ms_step", times.update);
  ms("data_wait_ms", "Train/Speed/data_wait_ms", record.data_wait);
  ms("exposed_comm_ms", "Train/Speed/exposed_comm_ms", record.exposed_comm);
  to->Add("samples_per_second", "Train/Speed/samples_per_second",
          record.samples_per_second);
  if (record.tokens > 0) {
    to->Add("tokens", "Train/Speed/tokens", record.tokens);
    to->Add("tokens_per_second", "Train/Speed/tokens_per_second",
            record.tokens_per_second);
  }
  to->AddKnown("tflops", "Train/Speed/tflops_per_rank", record.tflops);
  to->AddKnown("mfu", "Train/Speed/mfu", record.mfu);
}

void AddStragglers(const StepRecord& record, Scalars* to) {
  if (record.world_size == 1) return;
  const auto add = [&](const std::string& what,
                       const StepRecord::Extremes& of) {
    to->Add(absl::StrCat(what, "_ms_slowest"),
            absl::StrCat("Train/Ranks/", what, "_ms_slowest"), 1000 * of.most);
    to->Add(absl::StrCat(what, "_ms_fastest"),
            absl::StrCat("Train/Ranks/", what, "_ms_fastest"), 1000 * of.least);
    to->Add(absl::StrCat(what, "_slowest_rank"),
            absl::StrCat("Train/Ranks/", what, "_slowest_rank"), of.slowest);
    to->Add(absl::StrCat(what, "_fastest_rank"),
            absl::StrCat("Train/Ranks/", what, "_fastest_rank"), of.fastest);
  };
  add("step", record.step_times);
  add("forward", record.forward_times);
}

}  // namespace

int RankMetrics::numel() {
  int count = 0;
  RankMetrics any;
  ForEachValue(any, [&](auto&) { ++count; });
  return count;
}

void RankMetrics::ToValues(absl::Span<double> values) const {
  size_t at = 0;
  ForEachValue(*this, [&](const auto& value) {
    values[at++] = static_cast<double>(value);
  });
}

RankMetrics RankMetrics::FromValues(absl::Span<const double> values) {
  RankMetrics metrics;
  size_t at = 0;
  ForEachValue(metrics, [&](auto& value) {
    value = static_cast<std::decay_t<decltype(value)>>(values[at++]);
  });
  return metrics;
}

void AddRanks(absl::Span<const RankMetrics> ranks, StepRecord* record) {
  double sum = 0, weight = 0;
  record->tokens = 0;
  for (const RankMetrics& rank : ranks) {
    sum += rank.loss_sum;
    weight += rank.loss_weight;
    record->tokens += rank.tokens;
    record->peak_bytes =
        std::max(record->peak_bytes, static_cast<int64_t>(rank.peak_bytes));
    for (size_t k = 0; k < rank.at_peak.by_kind.size(); ++k) {
      record->at_peak.by_kind[k] =
          std::max(record->at_peak.by_kind[k], rank.at_peak.by_kind[k]);
    }
    record->data_wait = MostKnown(record->data_wait, rank.data_wait);
    record->exposed_comm = MostKnown(record->exposed_comm, rank.exposed_comm);
  }
  if (weight > 0) record->loss = sum / weight;
  record->world_size = static_cast<int>(ranks.size());
  record->step_times = ExtremesOf(ranks, &StepTimes::step);
  record->forward_times = ExtremesOf(ranks, &StepTimes::forward);
  record->times = ranks[0].times;
  record->times.step = record->step_times.most;
}

StepMetrics MetricsOf(const StepRecord& record) {
  StepMetrics metrics;
  metrics.step = record.step;
  metrics.samples = record.samples;
  metrics.unix_seconds = record.unix_seconds;
  Scalars to(&metrics);
  // What the loss is not known of has had no data; one that is NaN is told.
  to.Add("loss", "Train/Samples/train_loss", record.loss);
  for (size_t g = 0; g < record.groups.size(); ++g) {
    const std::string suffix =
        g == 0 ? "" : absl::StrCat("/", record.groups[g].name);
    to.Add(absl::StrCat("lr", suffix), absl::StrCat("Train/Samples/lr", suffix),
           record.groups[g].learning_rate);
  }
  to.AddKnown("grad_norm", "Train/Samples/grad_norm", record.grad_norm);
  if (record.has_loss_scale) {
    to.Add("loss_scale", "Train/Samples/loss_scale", record.loss_scale);
  }
  to.Add("skipped", "Train/Samples/skipped", record.skipped ? 1 : 0);
  to.Add("skipped_steps", "Train/Samples/skipped_steps",
         static_cast<double>(record.skipped_steps));
  AddSpeed(record, &to);
  to.Add("memory_peak_bytes", "Train/Memory/peak_bytes",
         static_cast<double>(record.peak_bytes));
  for (int k = 0; k < kNumHeldKinds; ++k) {
    const auto kind = static_cast<HeldKind>(k);
    if (record.at_peak[kind] == 0) continue;
    const std::string name(HeldKindName(kind));
    to.Add(absl::StrCat("memory_", name, "_bytes"),
           absl::StrCat("Train/Memory/", name, "_bytes"),
           static_cast<double>(record.at_peak[kind]));
  }
  AddStragglers(record, &to);
  return metrics;
}

}  // namespace tessera
