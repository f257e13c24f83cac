#include "examples/gpt/progress.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <functional>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "base/memory/memory.h"
#include "base/status.h"

namespace {

constexpr int kBarCells = 24;
constexpr int kLeastBarCells = 4;
constexpr int kUnknownColumns = 100;

int TerminalColumns(FILE* out) {
  struct winsize size = {};
  if (ioctl(fileno(out), TIOCGWINSZ, &size) != 0 || size.ws_col == 0) {
    return kUnknownColumns;
  }
  return size.ws_col;
}

std::string Megabytes(int64_t bytes) {
  return absl::StrCat(static_cast<int64_t>(std::lround(bytes / 1e6)));
}

// "412/409", or "405..412" for more ranks than fit.
std::string PerRank(const std::vector<RankMemory>& memory,
                    int64_t RankMemory::*field) {
  std::vector<int64_t> values;
  for (const RankMemory& rank : memory) values.push_back(rank.*field);
  if (values.size() <= 4) {
    return absl::StrJoin(values, "/", [](std::string* out, int64_t bytes) {
      absl::StrAppend(out, Megabytes(bytes));
    });
  }
  const auto [least, most] = std::minmax_element(values.begin(), values.end());
  return absl::StrCat(Megabytes(*least), "..", Megabytes(*most));
}

}  // namespace

absl::StatusOr<std::vector<RankMemory>> GatherMemory(
    const tessera::MemoryLedger& ledger, tessera::Communicator& communicator) {
  const auto resident = tessera::ReadResidentMemory();  // absent: shown as 0
  const std::string mine = absl::StrCat(resident.ok() ? resident->rss_bytes : 0,
                                        " ", ledger.total().peak_bytes);
  TESSERA_ASSIGN_OR_RETURN(
      const std::vector<std::string> all,
      communicator.AllGatherStrings(mine, {"memory of each rank"}));
  std::vector<RankMemory> memory;
  for (const std::string& text : all) {
    const std::vector<std::string> parts = absl::StrSplit(text, ' ');
    RankMemory rank;
    if (parts.size() != 2 ||
        !absl::SimpleAtoi(parts[0], &rank.resident_bytes) ||
        !absl::SimpleAtoi(parts[1], &rank.counted_peak_bytes)) {
      return absl::InternalError(
          absl::StrCat("memory of a rank: got '", text, "'"));
    }
    memory.push_back(rank);
  }
  return memory;
}

std::string Describe(const std::vector<RankMemory>& memory) {
  return absl::StrCat(PerRank(memory, &RankMemory::resident_bytes),
                      " MB, counted peak ",
                      PerRank(memory, &RankMemory::counted_peak_bytes));
}

Progress::Progress(FILE* out, int64_t total_steps)
    : out_(out),
      terminal_(out != nullptr && isatty(fileno(out)) != 0),
      total_steps_(total_steps) {}

Progress::~Progress() {
  if (drawing_) std::fputc('\n', out_);
  if (out_ != nullptr) std::fflush(out_);
}

bool Progress::IsDue(int64_t step) const {
  const int64_t tenth = std::max<int64_t>(1, (total_steps_ + 9) / 10);
  return step == 1 || step == total_steps_ || step % tenth == 0;
}

void Progress::SetMemory(const std::vector<RankMemory>& memory) {
  memory_ = Describe(memory);
}

std::string Progress::Line(const State& state, int columns) const {
  const int width = static_cast<int>(absl::StrCat(total_steps_).size());
  const std::string text = absl::StrFormat(
      "%*d/%d  loss %.4f  %.0f tok/s  %s", width, state.step, total_steps_,
      state.loss, state.tokens_per_second, memory_);
  if (!terminal_) return text;
  // The bar gets what room the words leave.
  const int64_t cells =
      std::min<int64_t>(kBarCells, columns - 3 - static_cast<int>(text.size()));
  if (cells < kLeastBarCells) return text.substr(0, columns);
  const int64_t full = cells * state.step / std::max<int64_t>(1, total_steps_);
  return absl::StrCat("[", std::string(full, '#'),
                      std::string(cells - full, '.'), "] ", text);
}

void Progress::Show(const State& state) {
  if (out_ == nullptr) return;
  if (terminal_) {
    // To the line's start, the text, and nothing of the older one behind it.
    // One column stays free, since some terminals wrap when it is filled.
    const std::string line = Line(state, TerminalColumns(out_) - 1);
    std::fprintf(out_, "\r%s\033[K", line.c_str());
    drawing_ = true;
  } else if (IsDue(state.step)) {
    std::fprintf(out_, "%s\n", Line(state, 0).c_str());
  }
  std::fflush(out_);
}

void Progress::Say(const std::string& line) {
  if (out_ == nullptr) return;
  if (drawing_) std::fputc('\n', out_);
  drawing_ = false;
  std::fprintf(out_, "%s\n", line.c_str());
  std::fflush(out_);
}
