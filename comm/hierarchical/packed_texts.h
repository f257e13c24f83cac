// Strings in one string, one after the other, each behind its length: 8 bytes,
// little-endian.
#ifndef COMM_HIERARCHICAL_PACKED_TEXTS_H_
#define COMM_HIERARCHICAL_PACKED_TEXTS_H_

#include <cstddef>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace tessera {

std::string PackTexts(const std::vector<std::string>& texts);

// What PackTexts was given, another rank's; Internal if `packed` is not `count`
// strings.
absl::StatusOr<std::vector<std::string>> UnpackTexts(absl::string_view packed,
                                                     size_t count);

}  // namespace tessera
#endif  // COMM_HIERARCHICAL_PACKED_TEXTS_H_
