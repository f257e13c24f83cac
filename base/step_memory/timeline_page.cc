// The page of a timeline is a drawing without scripts, so that it can be mailed
// and looked at anywhere.
#include <algorithm>
#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_replace.h"
#include "base/page/page_numbers.h"
#include "base/page/page_style.h"
#include "base/step_memory/memory_timeline.h"

namespace tessera {
namespace {

// The drawing's size in units of the view box, which is stretched.
constexpr int kWidth = 1000, kHeight = 360;
constexpr int kBands = 250;  // of what is shown for a moment
constexpr size_t kMostPhases = 40;
// The largest kinds that do not change come first, below the others.
constexpr HeldKind kOrder[] = {
    HeldKind::kTensors,   HeldKind::kOther,         HeldKind::kParameters,
    HeldKind::kOptimizer, HeldKind::kCommunication, HeldKind::kGradients,
    HeldKind::kWorking,   HeldKind::kTemporary,     HeldKind::kActivations,
};

int ColorOf(HeldKind kind) { return MemoryKindColor(HeldKindName(kind)); }

std::string Escaped(absl::string_view text) {
  return absl::StrReplaceAll(
      text, {{"&", "&amp;"}, {"<", "&lt;"}, {">", "&gt;"}, {"\"", "&quot;"}});
}

// Returns one sample for each column: the largest of those that fall into it,
// or where none does what was held before.
std::vector<MemoryTimeline::Sample> Columns(const MemoryTimeline& timeline,
                                            int64_t begin, int64_t end) {
  std::vector<MemoryTimeline::Sample> columns;
  const double nanos = static_cast<double>(std::max<int64_t>(1, end - begin));
  size_t next = 0;
  MemoryTimeline::Sample before;
  if (!timeline.samples.empty()) before = timeline.samples.front();
  for (int x = 0; x < kWidth; ++x) {
    MemoryTimeline::Sample largest = before;
    bool first = true;
    for (; next < timeline.samples.size(); ++next) {
      const MemoryTimeline::Sample& sample = timeline.samples[next];
      const double at = static_cast<double>(sample.at - begin) / nanos;
      if (at * kWidth >= x + 1 && x + 1 < kWidth) break;
      if (first || sample.held.total() > largest.held.total()) largest = sample;
      first = false;
      before = sample;
    }
    columns.push_back(largest);
  }
  return columns;
}

class Page {
 public:
  Page(const MemoryTimeline& timeline, int rank)
      : timeline_(timeline), rank_(rank) {
    if (!timeline.phases.empty()) {
      begin_ = timeline.phases.front().begin;
      end_ = timeline.phases.back().end;
    }
    for (const MemoryTimeline::Slice& phase : timeline.phases) {
      // Between a backward and the step lies a forward of no time.
      const bool shows = (phase.end - phase.begin) * 1000 >= end_ - begin_;
      if (shows) phases_.push_back(phase);
    }
    columns_ = Columns(timeline, begin_, end_);
    for (const auto& column : columns_) {
      top_ = std::max(top_, column.held.total());
    }
  }

  std::string Text() {
    Head();
    absl::StrAppend(&html_,
                    "<figure class=\"chart wide\"><figcaption>held over time, "
                    "by kind</figcaption>\n<div class=\"plot phased\"><svg "
                    "viewBox=\"0 0 ",
                    kWidth, " ", kHeight,
                    "\" preserveAspectRatio=\"none\" role=\"img\" "
                    "aria-label=\"held over time\">\n");
    Areas();
    Axes();
    Bands();
    absl::StrAppend(&html_, "</svg>\n", words_);
    Phases();
    absl::StrAppend(&html_, "</div>\n");
    Legend();
    absl::StrAppend(&html_, "</figure>\n");
    absl::StrAppend(&html_, "<div class=\"grid2\">\n");
    Kinds();
    PhaseTable();
    absl::StrAppend(&html_, "</div>\n");
    Units();
    absl::StrAppend(&html_, "</main></body></html>\n");
    return std::move(html_);
  }

 private:
  double X(int64_t at) const {
    return static_cast<double>(at - begin_) / Length() * kWidth;
  }
  double Y(double bytes) const {
    return kHeight - bytes / static_cast<double>(top_) * kHeight;
  }
  double Length() const {
    return static_cast<double>(std::max<int64_t>(1, end_ - begin_));
  }
  static double Ms(int64_t nanos) { return static_cast<double>(nanos) / 1e6; }
  static std::string Bytes(int64_t bytes) {
    return ShortNumber(static_cast<double>(bytes), "bytes");
  }

  void Head() {
    const std::string title = absl::StrCat(
        kMemoryPageTitle,
        timeline_.step > 0 ? absl::StrCat("step ", CountText(timeline_.step))
                           : "a step",
        ", rank ", rank_);
    const HeldMoment& peak = timeline_.report.at_peak;
    absl::StrAppend(
        &html_, PageHead(title), "<h1>", title, "</h1>\n<p class=\"facts\">",
        "Peak: <b>", Bytes(timeline_.report.peak_bytes), "</b> (",
        CountText(timeline_.report.peak_bytes), " bytes), in ",
        MemoryPhaseName(peak.phase), peak.unit.empty() ? "" : ", unit ",
        Escaped(peak.unit), ".</p>\n");
    if (timeline_.step > 0) {
      absl::StrAppend(&html_,
                      "<p class=\"facts soft\">Steps are counted from the "
                      "engine's Create.</p>\n");
    }
  }

  // Each kind is a band between the sums below it and with it.
  void Areas() {
    std::vector<int64_t> below(columns_.size(), 0);
    for (const HeldKind kind : kOrder) {
      std::string points;
      bool any = false;
      const auto point = [&](size_t x, int64_t bytes) {
        absl::StrAppendFormat(&points, "%d,%.1f ", x,
                              Y(static_cast<double>(bytes)));
      };
      for (size_t x = columns_.size(); x-- > 0;) point(x, below[x]);
      for (size_t x = 0; x < columns_.size(); ++x) {
        const int64_t bytes = columns_[x].held[kind];
        any |= bytes != 0;
        below[x] += bytes;
        point(x, below[x]);
      }
      if (!any) continue;
      absl::StrAppendFormat(&html_, "<polygon class=\"f%d\" points=\"%s\"/>\n",
                            ColorOf(kind), points);
    }
  }

  void Word(const char* place, const char* side, double percent,
            const std::string& text) {
    absl::StrAppendFormat(&words_,
                          "<span class=\"%s\" style=\"%s:%.2f%%\">%s</span>\n",
                          place, side, percent, text);
  }

  void Axes() {
    double unit = 1;
    while (static_cast<double>(top_) / unit >= 1024) unit *= 1024;
    for (const double tick :
         NiceTicks(0, static_cast<double>(top_) / unit, 5)) {
      const double y = Y(tick * unit);
      absl::StrAppendFormat(&html_, "<path class=\"grid\" d=\"M0 %.1fH%d\"/>\n",
                            y, kWidth);
      Word("y", "top", 100 * y / kHeight, ShortNumber(tick * unit, "bytes"));
    }
    absl::StrAppendFormat(&html_, "<path class=\"axis\" d=\"M0 %dH%d\"/>\n",
                          kHeight, kWidth);
    const std::vector<double> ticks = NiceTicks(0, Ms(end_ - begin_), 5);
    const std::vector<std::string> texts = TickTexts(ticks, "ms");
    for (size_t i = 0; i < ticks.size(); ++i) {
      Word("x", "left", 100 * ticks[i] / Ms(end_ - begin_), texts[i]);
    }
    absl::StrAppend(&words_,
                    "<span class=\"yl\">bytes</span>"
                    "<span class=\"xl\">ms</span>\n");
  }

  // Over each moment lies an element that says what was held.
  void Bands() {
    constexpr size_t kEach = kWidth / kBands;
    for (size_t x = 0; x + kEach <= columns_.size(); x += kEach) {
      const auto largest = std::max_element(
          columns_.begin() + static_cast<std::ptrdiff_t>(x),
          columns_.begin() + static_cast<std::ptrdiff_t>(x + kEach),
          [](const auto& a, const auto& b) {
            return a.held.total() < b.held.total();
          });
      std::string title = absl::StrCat(
          "at ",
          ShortNumber(Ms(end_ - begin_) * static_cast<double>(x) / kWidth,
                      "ms"),
          " ms: ", Bytes(largest->held.total()));
      for (const HeldKind kind : kOrder) {
        if (largest->held[kind] == 0) continue;
        absl::StrAppend(&title, "\n", HeldKindName(kind), ": ",
                        Bytes(largest->held[kind]));
      }
      absl::StrAppendFormat(&html_,
                            "<g class=\"h\"><title>%s</title><rect x=\"%d\" "
                            "width=\"%d\" height=\"%d\"/></g>\n",
                            title, x, kEach, kHeight);
    }
  }

  // Words that a phase has no room for are cut off, and shown at the pointer.
  void Phases() {
    for (const auto& phase : phases_) {
      const double left = 100 * X(phase.begin) / kWidth;
      absl::StrAppendFormat(
          &html_,
          "<span class=\"phase\" style=\"left:%.2f%%;width:%.2f%%\" "
          "title=\"%s, %s ms\">%s</span>\n",
          left, 100 * X(phase.end) / kWidth - left, Escaped(phase.name),
          ShortNumber(Ms(phase.end - phase.begin), "ms"), Escaped(phase.name));
    }
  }

  bool IsHeld(HeldKind kind) const {
    return std::any_of(
        columns_.begin(), columns_.end(),
        [&](const auto& column) { return column.held[kind] != 0; });
  }

  void Legend() {
    absl::StrAppend(&html_, "<ul class=\"legend\">");
    for (const HeldKind kind : kOrder) {
      if (!IsHeld(kind)) continue;
      absl::StrAppend(&html_, "<li><span class=\"key b", ColorOf(kind),
                      "\"></span>", HeldKindName(kind), "</li>");
    }
    absl::StrAppend(&html_, "</ul>\n");
  }

  void Row(const std::string& name, int64_t bytes) {
    absl::StrAppend(&html_, "<tr><td class=\"name\">", name, "</td><td>",
                    CountText(bytes), "</td><td>", Bytes(bytes),
                    "</td></tr>\n");
  }

  // Kinds of no bytes are left out.
  void Kinds() {
    absl::StrAppend(&html_,
                    "<section><h2>Held at the peak</h2>\n<div class=\"card "
                    "scroll\"><table><tr><th class=\"name\">kind</th><th>bytes"
                    "</th><th></th></tr>\n");
    const HeldMemory& held = timeline_.report.at_peak.held;
    for (const HeldKind kind : kOrder) {
      if (held[kind] == 0) continue;
      Row(absl::StrCat("<span class=\"key b", ColorOf(kind), "\"></span>",
                       HeldKindName(kind)),
          held[kind]);
    }
    absl::StrAppend(&html_, "</table></div></section>\n");
  }

  void PhaseTable() {
    absl::StrAppend(
        &html_,
        "<section><h2>Phases</h2>\n<div class=\"card scroll\"><table><tr>"
        "<th class=\"name\">phase</th><th>from ms</th><th>to ms"
        "</th><th>most held</th></tr>\n");
    const size_t shown = std::min(kMostPhases, phases_.size());
    for (size_t i = 0; i < shown; ++i) {
      const MemoryTimeline::Slice& phase = phases_[i];
      int64_t most = 0;
      for (const auto& sample : timeline_.samples) {
        if (sample.at < phase.begin || sample.at > phase.end) continue;
        most = std::max(most, sample.held.total());
      }
      absl::StrAppend(&html_, "<tr><td class=\"name\">", Escaped(phase.name),
                      "</td><td>", ShortNumber(Ms(phase.begin - begin_), "ms"),
                      "</td><td>", ShortNumber(Ms(phase.end - begin_), "ms"),
                      "</td><td>", most == 0 ? "as before" : Bytes(most),
                      "</td></tr>\n");
    }
    absl::StrAppend(&html_, "</table></div>\n");
    if (shown < phases_.size()) {
      absl::StrAppend(&html_, "<p class=\"note\">", phases_.size() - shown,
                      " more phases</p>\n");
    }
    absl::StrAppend(&html_, "</section>\n");
  }

  void Units() {
    if (!timeline_.report.activations.empty()) {
      absl::StrAppend(
          &html_,
          "<h2>Activations by unit</h2>\n<p>Tensors that were made while the "
          "unit was the last one used, and were there when the forward "
          "ended.</p>\n<div class=\"card scroll\"><table><tr><th "
          "class=\"name\">unit</th><th>bytes</th><th></th></tr>\n");
      for (const UnitActivations& unit : timeline_.report.activations) {
        Row(unit.unit.empty() ? "(before the first unit)" : Escaped(unit.unit),
            unit.bytes);
      }
      absl::StrAppend(&html_, "</table></div>\n");
    }
    if (timeline_.changes_per_sample > 1) {
      absl::StrAppend(&html_, "<p>Each sample is the largest of ",
                      timeline_.changes_per_sample, " changes.</p>\n");
    }
  }

  const MemoryTimeline& timeline_;
  const int rank_;
  int64_t begin_ = 0, end_ = 0;
  std::vector<MemoryTimeline::Slice> phases_;  // those that can be seen
  std::vector<MemoryTimeline::Sample> columns_;
  int64_t top_ = 1;  // bytes
  std::string html_, words_;
};

}  // namespace

std::string ToPage(const MemoryTimeline& timeline, int rank) {
  return Page(timeline, rank).Text();
}

}  // namespace tessera
