// What the header of a safetensors file says of its tensors (format:
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

// The format's limit.
inline constexpr int64_t kMaxSafetensorsHeaderBytes = 100'000'000;
// Ours, of JSON's values (some ten a tensor): in memory each is 100 bytes, in
// the file it may be two.
inline constexpr int64_t kMaxSafetensorsHeaderValues = 2'000'000;
inline constexpr int64_t kSafetensorsLengthBytes = 8;

struct SafetensorsTensor {
  std::string name;        // any UTF-8
  std::string dtype_name;  // as the file says: "BF16"
  int64_t item_bytes = 0;  // of an element; 0: a dtype that is not known
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

// How a file of `tensors`, which lie in it in this order, begins: the header's
// length, the header, and blanks so that the first is aligned. Only names,
// dtypes, sizes and bytes of `tensors` count. {"format": "pt"} is what Hugging
// Face's transformers ask for. InvalidArgument: a name that is not UTF-8 or is
// the format's own, or more than the format's limit. `path`: for messages.
// LOCAL.
absl::StatusOr<std::string> SafetensorsHeaderText(
    const std::vector<SafetensorsTensor>& tensors, const std::string& path);

// A tensor's or key's name in quotes, fit for a message.
std::string QuotedName(absl::string_view name);

}  // namespace tessera
#endif  // CHECKPOINT_EXCHANGE_SAFETENSORS_HEADER_H_
