#include "monitor/record_framing.h"

#include <cstddef>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/crc32c.h"

namespace tessera {
namespace {

constexpr size_t kHead = 12, kTail = 4;

template <typename T>
std::string LittleEndian(T value) {
  std::string bytes;
  for (size_t i = 0; i < sizeof(T); ++i) {
    bytes.push_back(static_cast<char>(value >> (8 * i) & 0xff));
  }
  return bytes;
}

template <typename T>
T FromLittleEndian(absl::string_view bytes) {
  T value = 0;
  for (size_t i = 0; i < sizeof(T); ++i) {
    value |= static_cast<T>(static_cast<unsigned char>(bytes[i])) << (8 * i);
  }
  return value;
}

}  // namespace

uint32_t MaskedCrc32c(absl::string_view bytes) {
  const uint32_t crc = Crc32c(bytes);
  return ((crc >> 15) | (crc << 17)) + 0xa282ead8U;
}

std::string Framed(absl::string_view bytes) {
  const std::string length = LittleEndian<uint64_t>(bytes.size());
  return absl::StrCat(length, LittleEndian(MaskedCrc32c(length)), bytes,
                      LittleEndian(MaskedCrc32c(bytes)));
}

absl::StatusOr<std::vector<std::string>> ReadFramed(absl::string_view content) {
  std::vector<std::string> records;
  size_t at = 0;
  const auto lost = [&](absl::string_view what) {
    return absl::DataLossError(
        absl::StrCat("record ", records.size(), ", byte ", at, ": ", what));
  };
  while (at < content.size()) {
    const absl::string_view rest = content.substr(at);
    if (rest.size() < kHead) return lost("ends within its length");
    const auto length = FromLittleEndian<uint64_t>(rest);
    if (FromLittleEndian<uint32_t>(rest.substr(8)) !=
        MaskedCrc32c(rest.substr(0, 8))) {
      return lost("the checksum of its length is another");
    }
    if (rest.size() - kHead < kTail || length > rest.size() - kHead - kTail) {
      return lost("ends within its bytes");
    }
    const absl::string_view bytes = rest.substr(kHead, length);
    if (FromLittleEndian<uint32_t>(rest.substr(kHead + length)) !=
        MaskedCrc32c(bytes)) {
      return lost("the checksum of its bytes is another");
    }
    records.emplace_back(bytes);
    at += kHead + length + kTail;
  }
  return records;
}

}  // namespace tessera
