#include "monitor/record_framing.h"

#include <cstddef>

#include "absl/strings/str_cat.h"
#include "base/crc32c.h"

namespace tessera {
namespace {

template <typename T>
std::string LittleEndian(T value) {
  std::string bytes;
  for (size_t i = 0; i < sizeof(T); ++i) {
    bytes.push_back(static_cast<char>(value >> (8 * i) & 0xff));
  }
  return bytes;
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

}  // namespace tessera
