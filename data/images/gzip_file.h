// Reads files packed by gzip as a whole.
#ifndef DATA_IMAGES_GZIP_FILE_H_
#define DATA_IMAGES_GZIP_FILE_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace tessera {

// Returns what a .gz file (RFC 1952) holds. Returns DataLoss naming path and
// byte of the file if it is not one, is damaged or ends too soon, and
// InvalidArgument if there are more than `max_bytes`. LOCAL.
absl::StatusOr<std::vector<uint8_t>> ReadGzipFile(const std::string& path,
                                                  int64_t max_bytes);

}  // namespace tessera
#endif  // DATA_IMAGES_GZIP_FILE_H_
