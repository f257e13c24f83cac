// The real TensorBoard reads what EventWriter writes: tensorboard_peer.py, run
// by the Python that the variable TESSERA_PYTHON names (an absolute path);
// without it, or where it has no tensorboard, the case is skipped.
#include <stdio.h>
#include <sys/wait.h>

#include <cstdlib>
#include <filesystem>
#include <string>

#include "absl/strings/str_cat.h"
#include "base/status_matchers.h"
#include "gtest/gtest.h"
#include "monitor/event_writer.h"
#include "monitor/histogram.h"

namespace tessera {
namespace {

constexpr int kLacksModules = 77;

// Returns the exit code; what the command prints goes to `said`.
int RunShell(const std::string& line, std::string* said) {
  FILE* const pipe = popen((line + " 2>&1").c_str(), "r");
  if (pipe == nullptr) return -1;
  for (int c = fgetc(pipe); c != EOF; c = fgetc(pipe)) {
    said->push_back(static_cast<char>(c));
  }
  const int status = pclose(pipe);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

TEST(TensorBoardTest, ReadsWhatIsWritten) {
  const char* const python = std::getenv("TESSERA_PYTHON");
  if (python == nullptr || *python == '\0') {
    GTEST_SKIP() << "TESSERA_PYTHON names no Python that has tensorboard";
  }
  const std::string folder = absl::StrCat(::testing::TempDir(), "/events");
  {
    TESSERA_ASSERT_OK_AND_ASSIGN(auto writer, OpenEventWriter(folder));
    StepMetrics metrics;
    metrics.unix_seconds = 1764302400;
    for (int step = 1; step <= 2; ++step) {
      metrics.samples = 8 * step;
      metrics.scalars = {{"loss", "Train/Samples/train_loss", 2.5 / step}};
      TESSERA_ASSERT_OK(writer->Write(metrics));
    }
    metrics.samples = 24;
    metrics.scalars.clear();
    metrics.histograms = {{"weights", HistogramOf({1, 2, 2, 3}, 2)}};
    metrics.texts = {{"note", "a *text*"}};
    TESSERA_ASSERT_OK(writer->Write(metrics));
  }
  std::string said;
  const int code = RunShell(
      absl::StrCat("PYTHONDONTWRITEBYTECODE=1 timeout --kill-after=5 50 ",
                   python, " -W ignore monitor/tensorboard_peer.py ", folder),
      &said);
  std::filesystem::remove_all(folder);
  if (code == kLacksModules) GTEST_SKIP() << said;
  ASSERT_EQ(code, 0) << said;
  EXPECT_EQ(said,
            "scalar Train/Samples/train_loss 8 2.5\n"
            "scalar Train/Samples/train_loss 16 1.25\n"
            "histogram weights 24 1.0 3.0 4.0 8.0 2:3 3:1\n"
            "text note/text_summary 24 a *text*\n");
}

}  // namespace
}  // namespace tessera
