// Frames records as TFRecord does, one after the other, for TensorBoard's
// files.
//
//   uint64 length | uint32 crc(length) | bytes[length] | uint32 crc(bytes)
//
// Numbers are little-endian; crc is CRC32C (RFC 3720), rotated right by 15
// bits, plus 0xa282ead8, so that a checksum of data that holds checksums is
// none of these.
#ifndef MONITOR_RECORD_FRAMING_H_
#define MONITOR_RECORD_FRAMING_H_

#include <cstdint>
#include <string>

#include "absl/strings/string_view.h"

namespace tessera {

// Returns the masked checksum.
uint32_t MaskedCrc32c(absl::string_view bytes);
// Returns `bytes` with their frame.
std::string Framed(absl::string_view bytes);

}  // namespace tessera
#endif  // MONITOR_RECORD_FRAMING_H_
