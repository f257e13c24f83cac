#include "checkpoint/disk/crc32c.h"

#include <isa-l/crc.h>

#include <algorithm>
#include <cstddef>

namespace tessera {

uint32_t Crc32c(absl::string_view bytes) { return ExtendCrc32c(0, bytes); }

uint32_t ExtendCrc32c(uint32_t crc, absl::string_view bytes) {
  // ISA-L counts in an int, and leaves the inversion at both ends to us.
  constexpr size_t kMost = size_t{1} << 30;
  crc = ~crc;
  while (!bytes.empty()) {
    const absl::string_view head =
        bytes.substr(0, std::min(bytes.size(), kMost));
    auto* const data =
        reinterpret_cast<unsigned char*>(const_cast<char*>(head.data()));
    crc = crc32_iscsi(data, static_cast<int>(head.size()), crc);
    bytes.remove_prefix(head.size());
  }
  return ~crc;
}

}  // namespace tessera
