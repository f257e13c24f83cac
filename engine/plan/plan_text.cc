// A plan as a table.
#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "base/json.h"
#include "base/page/page_numbers.h"
#include "base/step_memory/held_memory.h"
#include "engine/plan/plan.h"

namespace tessera {
namespace {

std::string Count(int64_t count) {
  const double value = static_cast<double>(count);
  if (value >= 1e9) return absl::StrFormat("%.2f billion", value / 1e9);
  if (value >= 1e6) return absl::StrFormat("%.1f million", value / 1e6);
  return absl::StrCat(count);
}

std::string Moment(const PlanMoment& at) {
  return absl::StrCat(at.backward ? "backward" : "forward",
                      at.module.empty() ? "" : absl::StrCat(" of ", at.module),
                      at.op.empty() ? "" : absl::StrCat(", ", at.op));
}

std::string Row(const StagePlan& stage, bool configured, int64_t memory) {
  std::string row =
      absl::StrFormat("%s %-5d", configured ? ">" : " ", stage.stage);
  for (int k = 0; k < kNumPlanKinds; ++k) {
    absl::StrAppendFormat(&row, " %11s",
                          BytesText(stage.peak[static_cast<PlanKind>(k)]));
  }
  absl::StrAppendFormat(
      &row, " %11s  %-4s %11s %10s\n", BytesText(stage.peak.total()),
      stage.peak.total() <= memory ? "yes" : "no",
      BytesText(stage.recomputed_peak.total()), BytesText(stage.sent_bytes));
  return row;
}

// Says when the peaks are; stages with the same moment share a line.
std::string Moments(const std::vector<StagePlan>& stages) {
  std::vector<std::pair<std::string, std::vector<int>>> moments;
  for (const StagePlan& stage : stages) {
    const std::string when = Moment(stage.at);
    if (moments.empty() || moments.back().first != when) {
      moments.push_back({when, {}});
    }
    moments.back().second.push_back(stage.stage);
  }
  std::string text;
  for (const auto& [when, of] : moments) {
    absl::StrAppend(&text, "  peak of stage ", absl::StrJoin(of, ", "), ": ",
                    when, "\n");
  }
  return text;
}

std::string TimeText(double seconds) { return Quantity(seconds * 1e3, "ms"); }

// What a step's time is made of. Communication of which nothing is known is no
// time of 0.
std::string Times(const PlanReport& report) {
  const bool known = report.world_size == 1 || report.rates->world_size > 1;
  std::string text = absl::StrFormat(
      "  %-5s %12s %12s %14s %12s %12s %12s %10s\n", "stage", "compute",
      "recompute", "communication", "update", "offload", "step", "samples/s");
  for (const StagePlan& stage : report.stages) {
    const StepSeconds& s = stage.seconds;
    absl::StrAppendFormat(
        &text, "%s %-5d %12s %12s %14s %12s %12s %12s %10.4g\n",
        stage.stage == report.configured_stage ? ">" : " ", stage.stage,
        TimeText(s.compute), TimeText(s.recompute),
        known ? TimeText(s.communication) : "-", TimeText(s.update),
        TimeText(s.offload), TimeText(s.total()),
        static_cast<double>(report.samples) / s.total());
  }
  const Rates& rates = *report.rates;
  absl::StrAppendFormat(&text, "by rates of %.4g Tflop/s, %.4g GB/s of memory",
                        rates.flops_per_second / 1e12,
                        rates.bytes_per_second / 1e9);
  if (rates.disk_read_per_second > 0) {
    absl::StrAppendFormat(
        &text, ", of a disk that reads %.4g and writes %.4g GB/s",
        rates.disk_read_per_second / 1e9, rates.disk_written_per_second / 1e9);
  }
  if (report.world_size == 1) return absl::StrCat(text, "\n");
  if (rates.world_size == 1) {
    return absl::StrCat(text,
                        "; nothing is known of collectives, which are "
                        "not in it\n");
  }
  absl::StrAppendFormat(&text, ", an all-reduce of 1 GB in %.4g s\n",
                        rates.all_reduce.Of(1'000'000'000));
  return text;
}

std::string Verdict(const PlanReport& report) {
  const int fits = report.lowest_that_fits();
  if (fits >= 0)
    return absl::StrCat("stage ", fits, " is the lowest that fits");
  for (const StagePlan& stage : report.stages) {
    if (stage.recomputed_peak.total() > report.memory_bytes) continue;
    return absl::StrCat("no stage fits, but stage ", stage.stage,
                        " would if units were recomputed in backward");
  }
  return "no stage fits: use more ranks, a 16-bit dtype or smaller "
         "micro-batches";
}

std::string JsonOf(const PlannedBytes& bytes) {
  std::string text = absl::StrCat("{\"total\": ", bytes.total());
  for (int k = 0; k < kNumPlanKinds; ++k) {
    const auto kind = static_cast<PlanKind>(k);
    absl::StrAppend(&text, ", \"", PlanKindName(kind), "\": ", bytes[kind]);
  }
  return absl::StrCat(text, "}");
}

std::string JsonOf(const StagePlan& stage, const PlanReport& report) {
  std::string text = absl::StrCat(
      "{\"stage\": ", stage.stage, ", \"fits\": ",
      stage.peak.total() <= report.memory_bytes ? "true" : "false",
      ",\n   \"between_steps_bytes\": ", JsonOf(stage.between_steps),
      ",\n   \"peak_bytes\": ", JsonOf(stage.peak),
      ",\n   \"peak_at\": ", QuoteJson(Moment(stage.at)),
      ",\n   \"recomputed_peak_bytes\": ", stage.recomputed_peak.total(),
      ", \"sent_bytes\": ", stage.sent_bytes,
      ", \"disk_read_bytes\": ", stage.disk.read,
      ", \"disk_written_bytes\": ", stage.disk.written);
  if (report.rates.has_value()) {
    const StepSeconds& s = stage.seconds;
    const bool known = report.world_size == 1 || report.rates->world_size > 1;
    absl::StrAppend(&text, ",\n   \"seconds\": {\"compute\": ", s.compute,
                    ", \"recompute\": ", s.recompute, ", \"communication\": ",
                    known ? absl::StrCat(s.communication) : "null",
                    ", \"update\": ", s.update, ", \"offload\": ", s.offload,
                    ", \"step\": ", s.total(), "}");
  }
  return absl::StrCat(text, "}");
}

}  // namespace

std::string PlanReport::ToJson() const {
  const auto stage_text = [&](std::string* out, const StagePlan& stage) {
    absl::StrAppend(out, JsonOf(stage, *this));
  };
  return absl::StrCat(
      "{\"world_size\": ", world_size, ", \"parameters\": ", parameters,
      ", \"trained\": ", trained, ", \"memory_bytes\": ", memory_bytes,
      ", \"micro_batch\": ", micro_batch, ", \"samples\": ", samples,
      ", \"flops\": ", flops, ", \"saved_bytes\": ", saved_bytes,
      ",\n \"base_bytes\": ", base_bytes,
      ", \"communication_bytes\": ", communication_bytes,
      ", \"configured_stage\": ",
      configured_stage < 0 ? "null" : absl::StrCat(configured_stage),
      ", \"lowest_that_fits\": ",
      lowest_that_fits() < 0 ? "null" : absl::StrCat(lowest_that_fits()),
      ",\n \"stages\": [", absl::StrJoin(stages, ",\n  ", stage_text), "]}");
}

std::string PlanReport::ToString() const {
  std::string text = absl::StrCat(
      Count(parameters), " parameters (", Count(trained), " trained) on ",
      world_size, world_size == 1 ? " rank" : " ranks", " with ",
      BytesText(memory_bytes), " each; a micro-batch keeps ",
      BytesText(saved_bytes), " for backward and takes ",
      absl::StrFormat("%.3g", static_cast<double>(flops)), " flops\n\n");
  absl::StrAppend(&text, "  stage ");
  for (int k = 0; k < kNumPlanKinds; ++k) {
    absl::StrAppendFormat(&text, "%*s", k == 0 ? 11 : 12,
                          PlanKindName(static_cast<PlanKind>(k)));
  }
  absl::StrAppend(&text, "        peak  fits  recomputed  sent/step\n");
  for (const StagePlan& stage : stages) {
    absl::StrAppend(&text,
                    Row(stage, stage.stage == configured_stage, memory_bytes));
  }
  absl::StrAppend(&text, Moments(stages));
  if (rates.has_value()) absl::StrAppend(&text, "\n", Times(*this));
  absl::StrAppend(&text, "\n", Verdict(*this),
                  "; libtorch and the program take ", BytesText(base_bytes),
                  " besides\n");
  if (communication_bytes > 0) {
    absl::StrAppend(&text, "communication buffers (", backend,
                    communication_is_estimated ? ", an estimate" : "",
                    ") take ", communication_is_estimated ? "" : "at most ",
                    BytesText(communication_bytes), " besides\n");
  }
  for (const StagePlan& stage : stages) {
    if (stage.disk.read + stage.disk.written == 0) continue;
    absl::StrAppend(&text, "at stage ", stage.stage, " a step reads ",
                    BytesText(stage.disk.read), " from a disk and writes ",
                    BytesText(stage.disk.written), "\n");
  }
  const int64_t most = std::max(formula.gradients, formula.activations);
  absl::StrAppend(
      &text, "by the formula, at stage 0: model ", BytesText(formula.model),
      " + optimizer ", BytesText(formula.optimizer), " + max(gradients ",
      BytesText(formula.gradients), ", activations ",
      BytesText(formula.activations),
      ") = ", BytesText(formula.model + formula.optimizer + most), "\n");
  absl::StrAppend(&text, absl::StrFormat("planned in %.2f s\n", seconds));
  return text;
}

}  // namespace tessera
