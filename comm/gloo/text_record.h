// TextRecord: what the ranks exchange first when they gather strings: each
// one's length, and as much of it as fits.
//
//   [ length, 8 bytes, little-endian | the string, up to kInlineBytes | .. ]
#ifndef COMM_GLOO_TEXT_RECORD_H_
#define COMM_GLOO_TEXT_RECORD_H_

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace tessera {

class TextRecord {
 public:
  static constexpr int64_t kInlineBytes = 248;
  static constexpr int64_t kBytes = 8 + kInlineBytes;
  // Control messages are small: a greater length is invalid.
  static constexpr int64_t kMaxTextBytes = int64_t{1} << 30;

  // Writes the record of `text` to kBytes of memory; unused bytes stay as they
  // are.
  static void Write(absl::string_view text, char* record);
  // Sets `text` to the part in the record, and returns the whole length, which
  // is greater where the rest has to be received. Internal if it is not a valid
  // length.
  static absl::StatusOr<int64_t> Read(const char* record, std::string* text);
};

}  // namespace tessera
#endif  // COMM_GLOO_TEXT_RECORD_H_
