#include "monitor/progress_bar.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace tessera {
namespace {

constexpr int kBarCells = 24;
constexpr int kLeastBarCells = 4;
constexpr int kUnknownColumns = 100;
constexpr int64_t kUnknownLineEach = 10;
// On a terminal the line is redrawn at most this often.
constexpr absl::Duration kRedrawAfter = absl::Milliseconds(50);

int TerminalColumns(std::FILE* out) {
  struct winsize size = {};
  if (ioctl(fileno(out), TIOCGWINSZ, &size) != 0 || size.ws_col == 0) {
    return kUnknownColumns;
  }
  return size.ws_col;
}

}  // namespace

std::string ClockText(absl::Duration time) {
  const int64_t seconds = absl::ToInt64Seconds(time + absl::Milliseconds(500));
  const int64_t minutes = seconds / 60, hours = minutes / 60;
  const std::string end =
      absl::StrFormat("%02d:%02d", minutes % 60, seconds % 60);
  if (hours == 0) return end;
  if (hours < 24) return absl::StrCat(hours, ":", end);
  return absl::StrFormat("%dd %02d:%s", hours / 24, hours % 24, end);
}

ProgressBar::ProgressBar(std::FILE* out, int64_t total_steps,
                         ProgressBarOptions options)
    : out_(out),
      total_steps_(total_steps),
      options_(std::move(options)),
      terminal_(out != nullptr && isatty(fileno(out)) != 0),
      begin_(options_.clock()) {}

ProgressBar::~ProgressBar() {
  if (drawing_) std::fputc('\n', out_);
  if (out_ != nullptr) std::fflush(out_);
}

bool ProgressBar::IsDue(int64_t step) const {
  const int64_t tenth = total_steps_ > 0
                            ? std::max<int64_t>(1, (total_steps_ + 9) / 10)
                            : kUnknownLineEach;
  const int64_t each = options_.line_each > 0 ? options_.line_each : tenth;
  return step == 1 || step == total_steps_ || step % each == 0;
}

// Returns "01:02<01:04".
std::string ProgressBar::Times(int64_t step) const {
  const absl::Duration now = options_.clock();
  std::string text = ClockText(now - begin_);
  if (first_step_ == 0 || step <= first_step_ || total_steps_ <= 0) return text;
  const absl::Duration left = (now - first_end_) *
                              static_cast<double>(total_steps_ - step) /
                              static_cast<double>(step - first_step_);
  return absl::StrCat(text, "<", ClockText(left));
}

std::string ProgressBar::Line(int64_t step, absl::string_view words,
                              int columns) const {
  const bool known = total_steps_ > 0;
  const int width = static_cast<int>(absl::StrCat(total_steps_).size());
  const std::string count =
      known ? absl::StrFormat("%*d/%d", width, step, total_steps_)
            : absl::StrCat("step ", step);
  const std::string text =
      absl::StrCat(count, "  ", Times(step), words.empty() ? "" : "  ", words);
  if (columns <= 0) return text;
  // The bar gets the room that the words leave.
  const int64_t cells =
      std::min<int64_t>(kBarCells, columns - 4 - static_cast<int>(text.size()));
  if (!known || cells < kLeastBarCells) {
    return text.substr(0, static_cast<size_t>(columns));
  }
  const int64_t full =
      cells * std::min(step, total_steps_) / std::max<int64_t>(1, total_steps_);
  return absl::StrCat("[", std::string(static_cast<size_t>(full), '#'),
                      std::string(static_cast<size_t>(cells - full), '.'),
                      "]  ", text);
}

void ProgressBar::Show(int64_t step, absl::string_view words) {
  if (out_ != nullptr) Draw(step, words);
  if (first_step_ == 0) {
    first_step_ = step;
    first_end_ = options_.clock();
  }
}

void ProgressBar::Draw(int64_t step, absl::string_view words) {
  if (terminal_) {
    const absl::Duration now = options_.clock();
    if (drawing_ && now - drawn_ < kRedrawAfter && !IsDue(step)) return;
    drawn_ = now;
    // It goes to the line's start, writes the text, and clears what follows.
    // One column stays free, since some terminals wrap when it is filled.
    const std::string line = Line(step, words, TerminalColumns(out_) - 1);
    std::fprintf(out_, "\r%s\033[K", line.c_str());
    drawing_ = true;
    std::fflush(out_);
  } else if (first_step_ == 0 || IsDue(step)) {
    std::fprintf(out_, "%s\n", Line(step, words, 0).c_str());
    std::fflush(out_);
  }
}

void ProgressBar::Say(absl::string_view line) {
  if (out_ == nullptr) return;
  if (std::exchange(drawing_, false)) std::fputc('\n', out_);
  std::fprintf(out_, "%s\n", std::string(line).c_str());
  std::fflush(out_);
}

}  // namespace tessera
