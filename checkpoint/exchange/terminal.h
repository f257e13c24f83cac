// Formats what commands write to a terminal.
#ifndef CHECKPOINT_EXCHANGE_TERMINAL_H_
#define CHECKPOINT_EXCHANGE_TERMINAL_H_

#include <cstdint>
#include <ostream>
#include <string>

#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "base/monotonic.h"

namespace tessera {

// Returns "12.0 MiB".
std::string SizeText(int64_t bytes);

// Returns text of a file, or a name, unchanged except that what a terminal
// would obey becomes a number ("\x1b"): control characters (except those of
// `keep`), and bytes that are not UTF-8.
std::string Printable(absl::string_view text, absl::string_view keep = "");

// Shows "12.0 MiB of 96.0 MiB" in one line, at most once a second.
class ProgressLine {
 public:
  // `err`: CommandCall::progress(); null shows nothing.
  explicit ProgressLine(std::ostream* err, Clock now = MonotonicNow)
      : err_(err), now_(std::move(now)), last_(now_()) {}
  ~ProgressLine() {
    if (shown_) *err_ << "\n";
  }
  ProgressLine(const ProgressLine&) = delete;
  ProgressLine& operator=(const ProgressLine&) = delete;
  void Show(int64_t done, int64_t of);

 private:
  std::ostream* const err_;
  const Clock now_;
  absl::Duration last_;
  bool shown_ = false;
};

}  // namespace tessera
#endif  // CHECKPOINT_EXCHANGE_TERMINAL_H_
