#include "report/run_charts.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <set>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "base/page/page_style.h"
#include "report/run_story.h"

namespace tessera {
namespace {

constexpr size_t kMostOthers = 48;
constexpr size_t kMostNamedResumes = 3;
constexpr size_t kSmoothedFrom = 80;  // points

std::vector<double> Finite(const std::vector<double>& values) {
  std::vector<double> finite;
  for (const double value : values) {
    if (std::isfinite(value)) finite.push_back(value);
  }
  return finite;
}

// Returns means over `width` values about each; gaps stay.
std::vector<double> Smoothed(const std::vector<double>& values, size_t width) {
  std::vector<double> means = values;
  for (size_t i = 0; i < values.size(); ++i) {
    if (!std::isfinite(values[i])) continue;
    const size_t begin = i < width / 2 ? 0 : i - width / 2;
    const size_t end = std::min(values.size(), i + width / 2 + 1);
    double sum = 0;
    size_t count = 0;
    for (size_t k = begin; k < end; ++k) {
      if (!std::isfinite(values[k])) continue;
      sum += values[k];
      ++count;
    }
    means[i] = sum / static_cast<double>(count);
  }
  return means;
}

// Returns whether the curves of both look alike: one is a multiple of the
// other.
bool AreMultiples(const std::vector<double>& a, const std::vector<double>& b) {
  double factor = std::numeric_limits<double>::quiet_NaN();
  for (size_t i = 0; i < a.size(); ++i) {
    if (std::isfinite(a[i]) != std::isfinite(b[i])) return false;
    if (!std::isfinite(a[i])) continue;
    if (std::isnan(factor) && b[i] != 0) factor = a[i] / b[i];
    if (std::isnan(factor)) continue;
    if (std::abs(a[i] - factor * b[i]) > 1e-3 * std::abs(a[i])) return false;
  }
  return std::isfinite(factor);
}

class Sorting {
 public:
  explicit Sorting(const RunFiles& run) : run_(run) {
    const RunStory story = StoryOf(run);
    for (const RunStory::Resume& resume : story.resumes) {
      const bool few = story.resumes.size() <= kMostNamedResumes;
      std::string text = few ? "resumed" : "";
      if (resume.other_ranks) {
        absl::StrAppend(&text, few ? ", " : "", resume.ranks,
                        resume.ranks == 1 ? " rank" : " ranks");
      }
      marks_.push_back({resume.step, std::move(text), resume.Title()});
    }
    // These are not figures of a run's progress.
    for (const char* const name :
         {"time", "samples", "tokens", "skipped", "skipped_steps",
          "ranks.slowest", "ranks.fastest", "step_slowest_rank",
          "step_fastest_rank", "forward_slowest_rank",
          "forward_fastest_rank"}) {
      used_.insert(name);
    }
  }

  std::vector<ChartGroup> Run() {
    Training();
    Speed();
    Waits();
    Memory();
    Others();
    for (ChartGroup& group : groups_) FillRows(&group.charts);
    return std::move(groups_);
  }

 private:
  Chart New(std::string title, std::string unit) const {
    Chart chart;
    chart.title = std::move(title);
    chart.unit = std::move(unit);
    chart.x = run_.steps;
    chart.marks = marks_;
    return chart;
  }
  void Take(const std::string& series, std::string name, Chart* chart) {
    const auto found = run_.series.find(series);
    if (found == run_.series.end() || used_.count(series) > 0) return;
    used_.insert(series);
    chart->lines.push_back({std::move(name), found->second});
  }
  void Drop(const std::string& series) { used_.insert(series); }
  // Drops a series whose curve would be that of another once more.
  void DropIfMultiple(const std::string& series, const std::string& of) {
    const auto* const values = FindSeries(run_, {series});
    const auto* const others = FindSeries(run_, {of});
    if (values == nullptr || others == nullptr) return;
    if (AreMultiples(*values, *others)) Drop(series);
  }
  // No half of a row stays empty.
  static void FillRows(std::vector<Chart>* charts) {
    size_t halves = 0;
    for (const Chart& chart : *charts)
      halves += chart.wide || chart.row ? 0 : 1;
    if (halves % 2 == 1) charts->back().row = true;
  }
  void Keep(Chart chart) {
    if (!chart.lines.empty()) groups_.back().charts.push_back(std::move(chart));
  }
  void Begin(std::string title) { groups_.push_back({std::move(title), {}}); }

  // Series and the names of their lines.
  using Lines = std::vector<std::pair<std::string, std::string>>;
  enum class Scale { kFromZero, kLog };
  void Add(std::string title, std::string unit, Scale scale,
           const Lines& lines) {
    Chart chart = New(std::move(title), std::move(unit));
    chart.from_zero = scale == Scale::kFromZero;
    chart.log_scale = scale == Scale::kLog;
    for (const auto& [series, name] : lines) Take(series, name, &chart);
    Keep(std::move(chart));
  }

  void Training() {
    Begin("Training");
    Lines losses = {{"loss", "loss"}}, rates = {{"lr", "lr"}};
    for (const auto& [name, values] : run_.series) {
      if (absl::EndsWith(name, "/loss") || absl::EndsWith(name, "_loss")) {
        losses.emplace_back(name, name);
      }
      if (absl::StartsWith(name, "lr/") || absl::StartsWith(name, "lr.")) {
        rates.emplace_back(name, name.substr(3));
      }
    }
    // The first group has no name beside its "lr".
    if (rates.size() > 1) rates[0].second = "default";
    Loss(losses);
    Add("learning rate", "", Scale::kFromZero, rates);
    Add("gradient norm", "", Scale::kLog, {{"grad_norm", "gradient norm"}});
    Add("loss scale", "", Scale::kLog, {{"loss_scale", "loss scale"}});
  }

  void Loss(const Lines& losses) {
    Chart chart = New("loss", "");
    chart.log_scale = chart.lowest = chart.wide = true;
    for (const auto& [series, name] : losses) {
      Take(series, name, &chart);
      if (series != "loss" || chart.lines.empty()) continue;
      const size_t points = Finite(chart.lines[0].y).size();
      if (points < kSmoothedFrom) continue;
      const size_t width = std::min<size_t>(points / 40 | 1, 101);
      chart.lines[0].color = 0;
      ChartLine mean = {absl::StrCat("mean of ", width, " steps"),
                        Smoothed(chart.lines[0].y, width), 0};
      chart.lines[0].faint = true;
      chart.lines.push_back(std::move(mean));
    }
    Keep(std::move(chart));
  }

  void Speed() {
    Begin("Speed");
    DropIfMultiple("samples_per_second", "tokens_per_second");
    DropIfMultiple("samples_per_s", "tokens_per_s");
    DropIfMultiple("tflops", "mfu");
    Add("tokens per second, all ranks", "tokens/s", Scale::kFromZero,
        {{"tokens_per_second", "tokens"}, {"tokens_per_s", "tokens"}});
    Add("samples per second, all ranks", "samples/s", Scale::kFromZero,
        {{"samples_per_second", "samples"}, {"samples_per_s", "samples"}});
    Add("operations of a rank", "TFLOP/s", Scale::kFromZero,
        {{"tflops", "TFLOP/s"}});
    Add("share of the device's peak (MFU)", "", Scale::kFromZero,
        {{"mfu", "mfu"}});
    Add("time of a step", "ms", Scale::kFromZero,
        {{"step_ms", "step"},
         {"forward_ms", "forward"},
         {"backward_ms", "backward"},
         {"update_ms", "update"},
         {"backward_inner_ms", "autograd"},
         {"backward_allreduce_ms", "rest of the reduction"}});
    Spread();
  }

  // The slowest rank's step is `step_ms`, so that only how far ranks are apart
  // is told.
  void Spread() {
    Chart chart = New("slowest rank behind the fastest", "ms");
    chart.from_zero = true;
    Difference("step_ms_slowest", "step_ms_fastest", "step", &chart);
    Difference("ranks.slowest_ms", "ranks.fastest_ms", "step", &chart);
    Difference("forward_ms_slowest", "forward_ms_fastest", "forward", &chart);
    Keep(std::move(chart));
  }

  void Difference(const std::string& most, const std::string& least,
                  std::string name, Chart* chart) {
    const auto* const high = FindSeries(run_, {most});
    const auto* const low = FindSeries(run_, {least});
    if (high == nullptr || low == nullptr) return;
    Drop(most);
    Drop(least);
    ChartLine line = {std::move(name), *high};
    for (size_t i = 0; i < line.y.size(); ++i) line.y[i] -= (*low)[i];
    chart->lines.push_back(std::move(line));
  }

  // Adds waits as parts of the step, where its time is known.
  void Waits() {
    Begin("Waits");
    const std::vector<double>* const step = FindSeries(run_, {"step_ms"});
    Chart waits = step == nullptr ? New("waited in a step", "ms")
                                  : New("share of a step that was waited", "%");
    waits.from_zero = true;
    for (const auto& [series, name] :
         Lines{{"exposed_comm_ms", "for communication (exposed)"},
               {"data_wait_ms", "for data"}}) {
      const size_t before = waits.lines.size();
      Take(series, name, &waits);
      if (waits.lines.size() == before || step == nullptr) continue;
      std::vector<double>& y = waits.lines.back().y;
      for (size_t i = 0; i < y.size(); ++i) y[i] *= 100 / (*step)[i];
    }
    Keep(std::move(waits));
  }

  void Memory() {
    Begin("Memory");
    Chart kinds = New("held at the peak of a step, by kind", "bytes");
    kinds.stacked = true;
    for (const auto& [series, values] : run_.series) {
      absl::string_view kind = series;
      const bool flat = absl::ConsumePrefix(&kind, "memory_") &&
                        absl::ConsumeSuffix(&kind, "_bytes");
      if (!flat && !absl::ConsumePrefix(&kind, "memory.")) continue;
      if (kind == "peak" || kind == "peak_bytes") continue;
      Take(series, std::string(kind), &kinds);
      if (kinds.lines.empty()) continue;
      kinds.lines.back().color = MemoryKindColor(kinds.lines.back().name);
    }
    // The largest is at the bottom.
    std::stable_sort(kinds.lines.begin(), kinds.lines.end(),
                     [](const ChartLine& a, const ChartLine& b) {
                       return LargestOf(a.y) > LargestOf(b.y);
                     });
    const bool any = !kinds.lines.empty();
    if (!any) {
      kinds.title = "peak of a step";
      kinds.stacked = false;
      kinds.from_zero = true;
    }
    for (const char* const peak :
         {"memory_peak_bytes", "memory.peak_bytes", "memory.peak"}) {
      const size_t before = kinds.lines.size();
      Take(peak, "peak", &kinds);
      if (kinds.lines.size() > before) kinds.lines.back().over = any;
    }
    Keep(std::move(kinds));
  }

  void Others() {
    Begin("Other figures");
    size_t left_out = 0;
    for (const auto& [name, values] : run_.series) {
      if (used_.count(name) > 0 || Finite(values).empty()) continue;
      if (groups_.back().charts.size() == kMostOthers) {
        ++left_out;
        continue;
      }
      Chart chart = New(name, absl::EndsWith(name, "_ms")      ? "ms"
                              : absl::EndsWith(name, "_bytes") ? "bytes"
                                                               : "");
      Take(name, name, &chart);
      Keep(std::move(chart));
    }
    if (left_out > 0) {
      absl::StrAppend(&groups_.back().title, " (", left_out, " more left out)");
    }
  }

  const RunFiles& run_;
  std::vector<ChartMark> marks_;
  std::set<std::string> used_;
  std::vector<ChartGroup> groups_;
};

}  // namespace

std::vector<ChartGroup> ChartsOf(const RunFiles& run) {
  return Sorting(run).Run();
}

const std::vector<double>* FindSeries(const RunFiles& run,
                                      const std::vector<std::string>& names) {
  for (const std::string& name : names) {
    const auto found = run.series.find(name);
    if (found != run.series.end()) return &found->second;
  }
  return nullptr;
}

double MedianOf(const std::vector<double>& values) {
  std::vector<double> sorted = Finite(values);
  if (sorted.empty()) return std::numeric_limits<double>::quiet_NaN();
  const auto middle =
      sorted.begin() + static_cast<std::ptrdiff_t>(sorted.size() / 2);
  std::nth_element(sorted.begin(), middle, sorted.end());
  return *middle;
}

double LargestOf(const std::vector<double>& values) {
  const std::vector<double> finite = Finite(values);
  return finite.empty() ? std::numeric_limits<double>::quiet_NaN()
                        : *std::max_element(finite.begin(), finite.end());
}

double LastOf(const std::vector<double>& values) {
  const std::vector<double> finite = Finite(values);
  return finite.empty() ? std::numeric_limits<double>::quiet_NaN()
                        : finite.back();
}

}  // namespace tessera
