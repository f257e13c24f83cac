// CRC32C: the checksum of bytes that lie on disks (iSCSI's and ext4's, of
// RFC 3720), by ISA-L with the processor's instructions. No torch.
#ifndef BASE_CRC32C_H_
#define BASE_CRC32C_H_

#include <cstdint>

#include "absl/strings/string_view.h"

namespace tessera {

// Of `bytes`; of "123456789" 0xe3069283. Any thread.
uint32_t Crc32c(absl::string_view bytes);

// Of the concatenation of what has `crc`, and `bytes`.
uint32_t ExtendCrc32c(uint32_t crc, absl::string_view bytes);

}  // namespace tessera
#endif  // BASE_CRC32C_H_
