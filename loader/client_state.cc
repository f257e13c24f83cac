#include "loader/client_state.h"

#include <cstdint>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/check.h"
#include "base/status.h"

namespace tessera {
namespace {

constexpr absl::string_view kHead = "tessera-parts";

absl::Status NotPacked(absl::string_view what, size_t offset) {
  return absl::DataLossError(absl::StrCat("client state: expected ", what,
                                          " at byte ", offset,
                                          "; was it made by PackClientState?"));
}

// Reads "name NUMBER\n" at `*offset`, and advances behind it.
bool TakeLine(absl::string_view bytes, size_t* offset, absl::string_view* name,
              uint64_t* number) {
  const size_t end = bytes.find('\n', *offset);
  if (end == absl::string_view::npos) return false;
  const absl::string_view line = bytes.substr(*offset, end - *offset);
  const size_t space = line.rfind(' ');
  if (space == absl::string_view::npos) return false;
  *name = line.substr(0, space);
  *offset = end + 1;
  return absl::SimpleAtoi(line.substr(space + 1), number);
}

}  // namespace

std::string PackClientState(const ClientParts& parts) {
  std::string packed = absl::StrCat(kHead, " ", parts.size(), "\n");
  for (const auto& [name, value] : parts) {
    TESSERA_CHECK(!absl::StrContains(name, '\n'));
    absl::StrAppend(&packed, name, " ", value.size(), "\n", value, "\n");
  }
  return packed;
}

absl::StatusOr<ClientParts> UnpackClientState(absl::string_view bytes) {
  size_t offset = 0;
  absl::string_view name;
  uint64_t count = 0, size = 0;
  if (!TakeLine(bytes, &offset, &name, &count) || name != kHead) {
    return NotPacked(absl::StrCat("'", kHead, " COUNT'"), 0);
  }
  ClientParts parts;
  for (uint64_t i = 0; i < count; ++i) {
    const size_t begin = offset;
    if (!TakeLine(bytes, &offset, &name, &size)) {
      return NotPacked("'NAME SIZE'", begin);
    }
    const size_t left = bytes.size() - offset;
    if (size >= left || bytes[offset + size] != '\n') {
      return NotPacked(
          absl::StrCat(size, " bytes of '", name, "' and an end of line"),
          offset);
    }
    parts[std::string(name)] = std::string(bytes.substr(offset, size));
    offset += size + 1;
  }
  if (offset != bytes.size()) return NotPacked("the end", offset);
  return parts;
}

absl::StatusOr<std::string> ClientPart(absl::string_view bytes,
                                       absl::string_view name) {
  TESSERA_ASSIGN_OR_RETURN(ClientParts parts, UnpackClientState(bytes));
  const auto it = parts.find(std::string(name));
  if (it != parts.end()) return std::move(it->second);
  return absl::NotFoundError(absl::StrCat(
      "client state: no part '", name, "'; there are: ",
      absl::StrJoin(parts, ", ", [](std::string* out, const auto& part) {
        out->append(part.first);
      })));
}

}  // namespace tessera
