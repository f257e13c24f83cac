// The page of a timeline is a drawing without scripts, so that it can be mailed
// and looked at anywhere.
#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_replace.h"
#include "base/step_memory/memory_timeline.h"

namespace tessera {
namespace {

constexpr int kWidth = 1000, kHeight = 360;  // of the area, in pixels
constexpr int kLeft = 90;                    // for the axis
// The largest kinds that do not change come first, below the others.
constexpr HeldKind kOrder[] = {
    HeldKind::kTensors,   HeldKind::kOther,         HeldKind::kParameters,
    HeldKind::kOptimizer, HeldKind::kCommunication, HeldKind::kGradients,
    HeldKind::kWorking,   HeldKind::kTemporary,     HeldKind::kActivations,
};

// These colours can be told apart by the colour-blind, too (Okabe and Ito).
const char* ColorOf(HeldKind kind) {
  switch (kind) {
    case HeldKind::kParameters:
      return "#0072B2";
    case HeldKind::kGradients:
      return "#D55E00";
    case HeldKind::kOptimizer:
      return "#56B4E9";
    case HeldKind::kWorking:
      return "#009E73";
    case HeldKind::kCommunication:
      return "#F0E442";
    case HeldKind::kActivations:
      return "#CC79A7";
    case HeldKind::kTemporary:
      return "#E69F00";
    case HeldKind::kTensors:
      return "#999999";
    case HeldKind::kOther:
      break;
  }
  return "#555555";
}

std::string Escaped(absl::string_view text) {
  return absl::StrReplaceAll(
      text, {{"&", "&amp;"}, {"<", "&lt;"}, {">", "&gt;"}, {"\"", "&quot;"}});
}

// Returns one sample for each pixel: the largest of those that fall into it, or
// where none does what was held before.
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
    columns_ = Columns(timeline, begin_, end_);
    for (const auto& column : columns_) {
      top_ = std::max(top_, column.held.total());
    }
  }

  std::string Text() {
    Head();
    Areas();
    Axis();
    Phases();
    absl::StrAppend(&html_, "</svg>\n");
    Kinds();
    Units();
    absl::StrAppend(&html_, "</body></html>\n");
    return std::move(html_);
  }

 private:
  double X(int64_t at) const {
    const auto length =
        static_cast<double>(std::max<int64_t>(1, end_ - begin_));
    return kLeft + static_cast<double>(at - begin_) / length * kWidth;
  }
  double Y(int64_t bytes) const {
    return kHeight -
           static_cast<double>(bytes) / static_cast<double>(top_) * kHeight;
  }

  void Head() {
    absl::StrAppendFormat(
        &html_,
        "<!DOCTYPE html>\n<html><head><meta charset=\"utf-8\">"
        "<title>Memory of a step, rank %d</title>\n<style>"
        "body{font:14px sans-serif;margin:2em;color:#222}"
        "table{border-collapse:collapse;margin:1em 0}"
        "td,th{padding:2px 12px;text-align:right;border-bottom:1px solid #ddd}"
        "td.name,th.name{text-align:left}"
        "</style></head><body>\n<h1>Memory of a step, rank %d</h1>\n"
        "<p>Peak: <b>%s</b>, in %s%s%s.</p>\n"
        "<svg width=\"%d\" height=\"%d\" font-size=\"12\">\n",
        rank_, rank_, BytesText(timeline_.report.peak_bytes),
        MemoryPhaseName(timeline_.report.at_peak.phase),
        timeline_.report.at_peak.unit.empty() ? "" : ", unit ",
        Escaped(timeline_.report.at_peak.unit), kLeft + kWidth + 20,
        kHeight + 60);
  }

  void AddPoint(size_t x, int64_t bytes, std::string* points) const {
    absl::StrAppendFormat(points, "%d,%.1f ", kLeft + static_cast<int>(x),
                          Y(bytes));
  }

  // Each kind is a band between the sums below it and with it.
  void Areas() {
    std::vector<int64_t> below(columns_.size(), 0);
    for (const HeldKind kind : kOrder) {
      std::string points;
      bool any = false;
      for (size_t x = columns_.size(); x-- > 0;) {
        AddPoint(x, below[x], &points);
      }
      for (size_t x = 0; x < columns_.size(); ++x) {
        const int64_t bytes = columns_[x].held[kind];
        any |= bytes != 0;
        below[x] += bytes;
        AddPoint(x, below[x], &points);
      }
      if (!any) continue;
      absl::StrAppendFormat(&html_,
                            "<polygon fill=\"%s\" points=\"%s\">"
                            "<title>%s</title></polygon>\n",
                            ColorOf(kind), points, HeldKindName(kind));
    }
  }

  void Axis() {
    for (int i = 0; i <= 4; ++i) {
      const int64_t bytes = top_ / 4 * i;
      absl::StrAppendFormat(
          &html_,
          "<line x1=\"%d\" x2=\"%d\" y1=\"%.1f\" y2=\"%.1f\" stroke=\"#000\" "
          "stroke-opacity=\".15\"/><text x=\"%d\" y=\"%.1f\" "
          "text-anchor=\"end\">%s</text>\n",
          kLeft, kLeft + kWidth, Y(bytes), Y(bytes), kLeft - 6,
          std::max(11.0, Y(bytes) + 4), BytesText(bytes));
    }
  }

  void Phases() {
    for (const auto& phase : timeline_.phases) {
      const double width = std::max(1.0, X(phase.end) - X(phase.begin));
      absl::StrAppendFormat(
          &html_,
          "<rect x=\"%.1f\" y=\"%d\" width=\"%.1f\" height=\"20\" "
          "fill=\"#eee\" stroke=\"#888\"><title>%s, %.3f ms</title></rect>\n",
          X(phase.begin), kHeight + 8, width, Escaped(phase.name),
          static_cast<double>(phase.end - phase.begin) / 1e6);
      if (width < 60) continue;
      absl::StrAppendFormat(&html_, "<text x=\"%.1f\" y=\"%d\">%s</text>\n",
                            X(phase.begin) + 4, kHeight + 22,
                            Escaped(phase.name));
    }
    absl::StrAppendFormat(
        &html_,
        "<text x=\"%d\" y=\"%d\">0 ms</text><text x=\"%d\" y=\"%d\" "
        "text-anchor=\"end\">%.3f ms</text>\n",
        kLeft, kHeight + 46, kLeft + kWidth, kHeight + 46,
        static_cast<double>(end_ - begin_) / 1e6);
  }

  void Kinds() {
    absl::StrAppend(&html_,
                    "<h2>Held at the peak</h2>\n<table><tr><th "
                    "class=\"name\">kind</th><th>bytes</th><th></th></tr>\n");
    const HeldMemory& held = timeline_.report.at_peak.held;
    for (const HeldKind kind : kOrder) {
      absl::StrAppendFormat(
          &html_,
          "<tr><td class=\"name\"><span style=\"background:%s\">"
          "&nbsp;&nbsp;&nbsp;</span> %s</td><td>%d</td><td>%s</td></tr>\n",
          ColorOf(kind), HeldKindName(kind), held[kind], BytesText(held[kind]));
    }
    absl::StrAppend(&html_, "</table>\n");
  }

  void Units() {
    absl::StrAppend(
        &html_,
        "<h2>Activations by unit</h2>\n<p>Tensors that were made while the "
        "unit was the last one used, and were there when the forward "
        "ended.</p>\n<table><tr><th class=\"name\">unit</th><th>bytes</th>"
        "<th></th></tr>\n");
    for (const UnitActivations& unit : timeline_.report.activations) {
      absl::StrAppend(
          &html_, "<tr><td class=\"name\">",
          unit.unit.empty() ? "(before the first unit)" : Escaped(unit.unit),
          "</td><td>", unit.bytes, "</td><td>", BytesText(unit.bytes),
          "</td></tr>\n");
    }
    absl::StrAppend(&html_, "</table>\n");
    if (timeline_.changes_per_sample > 1) {
      absl::StrAppend(&html_, "<p>Each sample is the largest of ",
                      timeline_.changes_per_sample, " changes.</p>\n");
    }
  }

  const MemoryTimeline& timeline_;
  const int rank_;
  int64_t begin_ = 0, end_ = 0;
  std::vector<MemoryTimeline::Sample> columns_;
  int64_t top_ = 1;  // bytes
  std::string html_;
};

}  // namespace

std::string ToPage(const MemoryTimeline& timeline, int rank) {
  return Page(timeline, rank).Text();
}

}  // namespace tessera
