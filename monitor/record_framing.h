// TFRecord: how records lie one behind the other in TensorBoard's files.
//
//   uint64 length | uint32 crc(length) | bytes[length] | uint32 crc(bytes)
//
// little-endian; crc is CRC32C (RFC 3720), turned right by 15 bits, plus
// 0xa282ead8: so that the checksum of what holds checksums is none of its own.
#ifndef MONITOR_RECORD_FRAMING_H_
#define MONITOR_RECORD_FRAMING_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace tessera {

// The masked checksum.
uint32_t MaskedCrc32c(absl::string_view bytes);
// `bytes` with what stands around them.
std::string Framed(absl::string_view bytes);
// The records of a file's content. DataLoss with the position of what is not
// whole, or has another checksum.
absl::StatusOr<std::vector<std::string>> ReadFramed(absl::string_view content);

}  // namespace tessera
#endif  // MONITOR_RECORD_FRAMING_H_
