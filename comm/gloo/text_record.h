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
  // Control messages are small. A length beyond this is none.
  static constexpr int64_t kMaxTextBytes = int64_t{1} << 30;

  // Writes that of `text` to kBytes of memory; the rest of them stays as it is.
  static void Write(absl::string_view text, char* record);
  // Sets `text` to what a record has of it, and returns the length of all of
  // it, which is more where the rest has to be received. Internal if that is no
  // length.
  static absl::StatusOr<int64_t> Read(const char* record, std::string* text);
};

}  // namespace tessera
#endif  // COMM_GLOO_TEXT_RECORD_H_
