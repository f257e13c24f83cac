#include "engine/observe/device_peak.h"

#include <filesystem>
#include <system_error>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "base/file.h"

namespace tessera {

namespace {

// Whether `words` stand in `text`, and are not a part of longer ones: an A1000
// is no A100, a GB200 no B200.
bool HasWords(absl::string_view text, absl::string_view words) {
  const auto ends = [&](size_t at) {
    return at >= text.size() || !absl::ascii_isalnum(text[at]);
  };
  for (size_t at = text.find(words); at != absl::string_view::npos;
       at = text.find(words, at + 1)) {
    if ((at == 0 || ends(at - 1)) && ends(at + words.size())) return true;
  }
  return false;
}

}  // namespace

double PeakFlopsOf(absl::string_view model) {
  struct Peak {
    const char* name;
    double tflops;
  };
  // The first that fits.
  static constexpr Peak kPeaks[] = {
      {"B200", 2250},     {"B100", 1750},    {"GH200", 989}, {"H200", 989},
      {"H100 PCIe", 756}, {"H100 NVL", 835}, {"H100", 989},  {"H800", 989},
      {"A100", 312},      {"A800", 312},     {"L40S", 362},  {"L40", 181},
      {"L4", 121},        {"A40", 150},      {"A30", 165},   {"A10", 125},
      {"V100", 125},      {"T4", 65},
  };
  for (const Peak& peak : kPeaks) {
    if (HasWords(model, peak.name)) return peak.tflops * 1e12;
  }
  return 0;
}

std::string GpuModel() {
  std::error_code error;
  const std::filesystem::directory_iterator gpus("/proc/driver/nvidia/gpus",
                                                 error);
  if (error) return "";
  for (const auto& gpu : gpus) {
    const auto text = ReadWholeFile((gpu.path() / "information").string());
    if (!text.ok()) continue;
    for (absl::string_view line : absl::StrSplit(*text, '\n')) {
      if (!absl::ConsumePrefix(&line, "Model:")) continue;
      return std::string(absl::StripAsciiWhitespace(line));
    }
  }
  return "";
}

}  // namespace tessera
