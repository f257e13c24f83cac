// What the header of a safetensors file says of its tensors (format:
// checkpoint/safetensors.h).
#ifndef CHECKPOINT_SAFETENSORS_HEADER_H_
#define CHECKPOINT_SAFETENSORS_HEADER_H_

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "c10/core/ScalarType.h"

namespace tessera {

// The format's limit.
inline constexpr int64_t kMaxSafetensorsHeaderBytes = 100'000'000;
inline constexpr int64_t kSafetensorsLengthBytes = 8;

struct SafetensorsTensor {
  std::string name;        // any UTF-8
  std::string dtype_name;  // as the file says: "BF16"
  // Undefined where libtorch has no such dtype.
  at::ScalarType dtype = at::ScalarType::Undefined;
  std::vector<int64_t> sizes;
  int64_t numel = 0;   // their product
  int64_t offset = 0;  // of the first byte, in the file
  int64_t bytes = 0;
  int file = 0;  // which one of several
};

struct SafetensorsHeader {
  std::vector<SafetensorsTensor> tensors;  // as they lie in the file
  std::vector<std::pair<std::string, std::string>> metadata;
};

// Reads and checks the JSON of a file of `file_bytes` bytes. DataLoss: "path:
// tensor 'name': what is wrong, expected what". LOCAL.
absl::StatusOr<SafetensorsHeader> ParseSafetensorsHeader(
    absl::string_view json, int64_t file_bytes, const std::string& path);

// "F32"; "" where the format has no such dtype.
std::string SafetensorsDtypeName(at::ScalarType dtype);

// A tensor's or key's name in quotes, fit for a message.
std::string QuotedName(absl::string_view name);

}  // namespace tessera
#endif  // CHECKPOINT_SAFETENSORS_HEADER_H_
