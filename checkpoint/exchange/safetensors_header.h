// Reads and writes the header of a safetensors file (format:
// checkpoint/exchange/safetensors_files.h). No torch.
#ifndef CHECKPOINT_EXCHANGE_SAFETENSORS_HEADER_H_
#define CHECKPOINT_EXCHANGE_SAFETENSORS_HEADER_H_

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace tessera {

// The format's limit of a header's length.
inline constexpr int64_t kMaxSafetensorsHeaderBytes = 100'000'000;
// Our limit of the number of JSON values (a tensor has some ten): each takes
// 100 bytes in memory, and as little as two in the file.
inline constexpr int64_t kMaxSafetensorsHeaderValues = 2'000'000;
inline constexpr int64_t kSafetensorsLengthBytes = 8;

struct SafetensorsTensor {
  std::string name;        // any UTF-8
  std::string dtype_name;  // as the file says: "BF16"
  int64_t item_bytes = 0;  // bytes of an element; 0: unknown dtype
  std::vector<int64_t> sizes;
  int64_t numel = 0;   // their product
  int64_t offset = 0;  // of the first byte, in the file
  int64_t bytes = 0;
  int file = 0;  // index of the file, if there are several
};

struct SafetensorsHeader {
  std::vector<SafetensorsTensor> tensors;  // in the order of the file
  std::vector<std::pair<std::string, std::string>> metadata;
};

// Reads and checks the JSON of a file of `file_bytes` bytes. Returns DataLoss:
// "path: tensor 'name': what is wrong, expected what". LOCAL.
absl::StatusOr<SafetensorsHeader> ParseSafetensorsHeader(
    absl::string_view json, int64_t file_bytes, const std::string& path);

// Returns the beginning of a file that holds `tensors` in this order: the
// header's length, the header, and blanks that align the first tensor. It uses
// only names, dtypes, sizes and bytes of `tensors`. {"format": "pt"} is in it,
// since Hugging Face's transformers ask for that. Returns InvalidArgument for a
// name that is not UTF-8 or that the format reserves, or for more than the
// format's limit. `path` is for messages. LOCAL.
absl::StatusOr<std::string> SafetensorsHeaderText(
    const std::vector<SafetensorsTensor>& tensors, const std::string& path);

// Returns the name of a tensor or key in quotes, fit for a message.
std::string QuotedName(absl::string_view name);

}  // namespace tessera
#endif  // CHECKPOINT_EXCHANGE_SAFETENSORS_HEADER_H_
