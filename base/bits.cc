#include "base/bits.h"

#include <cstdlib>
#include <cstring>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace tessera {

std::string HexFloat(double value) { return absl::StrFormat("%a", value); }

absl::StatusOr<double> ParseHexDouble(absl::string_view text) {
  const std::string copy(text);
  char* end = nullptr;
  const double value = std::strtod(copy.c_str(), &end);
  if (copy.empty() || end != copy.c_str() + copy.size()) {
    return absl::InvalidArgumentError(
        absl::StrCat("expected a number such as 0x1.8p+1, got '", text, "'"));
  }
  return value;
}

uint64_t Fingerprint(const void* data, int64_t bytes) {
  const char* p = static_cast<const char*>(data);
  uint64_t h = static_cast<uint64_t>(bytes) * kMixStep;
  uint64_t word = 0;
  for (; bytes >= 8; bytes -= 8, p += 8) {
    std::memcpy(&word, p, 8);
    h = MixBits(h ^ word);
  }
  if (bytes > 0) {
    word = 0;
    std::memcpy(&word, p, static_cast<size_t>(bytes));
    h = MixBits(h ^ word);
  }
  return h;
}

}  // namespace tessera
