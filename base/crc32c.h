// CRC32C is the checksum of bytes that lie on disks (RFC 3720; iSCSI and ext4
// use it). ISA-L computes it with the processor's instructions. No torch.
#ifndef BASE_CRC32C_H_
#define BASE_CRC32C_H_

#include <cstdint>

#include "absl/strings/string_view.h"

namespace tessera {

// Returns the checksum of `bytes`; that of "123456789" is 0xe3069283. Any
// thread.
uint32_t Crc32c(absl::string_view bytes);

// Returns the checksum of the bytes that have `crc` followed by `bytes`.
uint32_t ExtendCrc32c(uint32_t crc, absl::string_view bytes);

}  // namespace tessera
#endif  // BASE_CRC32C_H_
