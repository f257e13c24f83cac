#include "report/run_charts.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <set>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"

namespace tessera {
namespace {

constexpr size_t kMostOthers = 48;

std::vector<double> Finite(const std::vector<double>& values) {
  std::vector<double> finite;
  for (const double value : values) {
    if (std::isfinite(value)) finite.push_back(value);
  }
  return finite;
}

class Sorting {
 public:
  explicit Sorting(const RunFiles& run) : run_(run) {
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
    return std::move(groups_);
  }

 private:
  Chart New(std::string title, std::string unit) const {
    Chart chart;
    chart.title = std::move(title);
    chart.unit = std::move(unit);
    chart.x = run_.steps;
    return chart;
  }
  void Take(const std::string& series, std::string name, Chart* chart) {
    const auto found = run_.series.find(series);
    if (found == run_.series.end() || used_.count(series) > 0) return;
    used_.insert(series);
    chart->lines.push_back({std::move(name), found->second});
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
    Add("loss", "", Scale::kLog, losses);
    Add("learning rate", "", Scale::kFromZero, rates);
    Add("gradient norm", "", Scale::kLog, {{"grad_norm", "gradient norm"}});
    Add("loss scale", "", Scale::kLog, {{"loss_scale", "loss scale"}});
  }

  void Speed() {
    Begin("Speed");
    Add("tokens a second, all ranks", "", Scale::kFromZero,
        {{"tokens_per_second", "tokens a second"},
         {"tokens_per_s", "tokens a second"}});
    Add("samples a second, all ranks", "", Scale::kFromZero,
        {{"samples_per_second", "samples a second"},
         {"samples_per_s", "samples a second"}});
    Add("operations of a rank", "TFLOP/s", Scale::kFromZero,
        {{"tflops", "TFLOP/s"}});
    Add("share of the device's peak (MFU)", "", Scale::kFromZero,
        {{"mfu", "mfu"}});
    Add("step on the slowest and fastest rank", "ms", Scale::kFromZero,
        {{"step_ms_slowest", "slowest"},
         {"step_ms_fastest", "fastest"},
         {"ranks.slowest_ms", "slowest"},
         {"ranks.fastest_ms", "fastest"}});
    Add("forward on the slowest and fastest rank", "ms", Scale::kFromZero,
        {{"forward_ms_slowest", "slowest"}, {"forward_ms_fastest", "fastest"}});
    Add("time of a step", "ms", Scale::kFromZero,
        {{"step_ms", "step"},
         {"forward_ms", "forward"},
         {"backward_ms", "backward"},
         {"update_ms", "update"},
         {"backward_inner_ms", "autograd"},
         {"backward_allreduce_ms", "rest of the reduction"}});
  }

  // Adds waits as parts of the step.
  void Waits() {
    Begin("Waits");
    const std::vector<double>* const step = FindSeries(run_, {"step_ms"});
    if (step != nullptr) {
      Chart shares = New("share of a step that was waited", "%");
      shares.from_zero = true;
      Share("exposed_comm_ms", "for communication (exposed)", *step, &shares);
      Share("data_wait_ms", "for data", *step, &shares);
      Keep(std::move(shares));
    }
    Add("waited in a step", "ms", Scale::kFromZero,
        {{"exposed_comm_ms", "for communication (exposed)"},
         {"data_wait_ms", "for data"}});
  }

  void Share(const std::string& series, std::string name,
             const std::vector<double>& step, Chart* chart) const {
    const auto found = run_.series.find(series);
    if (found == run_.series.end()) return;
    ChartLine line = {std::move(name), found->second};
    for (size_t i = 0; i < line.y.size(); ++i) line.y[i] *= 100 / step[i];
    chart->lines.push_back(std::move(line));
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
    }
    // The line that changes least is at the bottom.
    std::stable_sort(kinds.lines.begin(), kinds.lines.end(),
                     [](const ChartLine& a, const ChartLine& b) {
                       return LargestOf(a.y) > LargestOf(b.y);
                     });
    Keep(std::move(kinds));
    Add("peak of a step", "bytes", Scale::kFromZero,
        {{"memory_peak_bytes", "peak"},
         {"memory.peak_bytes", "peak"},
         {"memory.peak", "peak"}});
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
