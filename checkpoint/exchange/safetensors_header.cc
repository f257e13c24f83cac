#include "checkpoint/exchange/safetensors_header.h"

#include <algorithm>
#include <optional>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/json.h"
#include "base/status.h"
#include "checkpoint/format/manifest.h"
#include "config/reader/json_reader.h"
#include "config/reader/utf8.h"

namespace tessera {
namespace {

constexpr char kMetadata[] = "__metadata__";
constexpr size_t kHeaderAlign = 8;  // as the format's own writer does
// {"name": {"shape": [2]}} needs 3; the rest is for keys of later versions.
constexpr int kMaxDepth = 8;

// Returns the size of more dtypes than checkpoints have.
int64_t BytesOf(absl::string_view dtype) {
  for (absl::string_view one : {"F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"}) {
    if (dtype == one) return 1;
  }
  return dtype == "C64" ? 8 : DtypeBytes(dtype);
}

// Accepts 12, but neither -12 nor 1.2e1.
std::optional<int64_t> CountOf(const JsonValue& value) {
  if (value.kind != JsonKind::kNumber ||
      !std::all_of(value.text.begin(), value.text.end(),
                   [](unsigned char c) { return absl::ascii_isdigit(c); })) {
    return std::nullopt;
  }
  return value.AsInt64();
}

// Reads one member of the header.
class TensorReader {
 public:
  TensorReader(const JsonMember& member, int64_t data_bytes,
               const std::string& path)
      : member_(member), data_bytes_(data_bytes), path_(path) {}

  absl::StatusOr<SafetensorsTensor> Read() {
    if (member_.value.kind != JsonKind::kObject) {
      return Fault(absl::StrCat("expected an object, got ",
                                JsonKindName(member_.value.kind)));
    }
    SafetensorsTensor tensor;
    tensor.name = member_.key;
    TESSERA_RETURN_IF_ERROR(ReadDtype(&tensor));
    TESSERA_RETURN_IF_ERROR(ReadShape(&tensor));
    TESSERA_RETURN_IF_ERROR(ReadOffsets(&tensor));
    TESSERA_RETURN_IF_ERROR(CheckBytes(tensor));
    return tensor;
  }

 private:
  absl::Status Fault(absl::string_view what) const {
    return absl::DataLossError(
        absl::StrCat(path_, ": tensor ", QuotedName(member_.key), ": ", what));
  }
  absl::StatusOr<const JsonValue*> Find(absl::string_view key,
                                        JsonKind kind) const {
    const JsonValue* value = member_.value.Find(key);
    if (value == nullptr) return Fault(absl::StrCat("has no ", key));
    if (value->kind == kind) return value;
    return Fault(absl::StrCat(key, ": expected ", JsonKindName(kind), ", got ",
                              JsonKindName(value->kind)));
  }
  absl::StatusOr<std::vector<int64_t>> ReadCounts(absl::string_view key) const {
    TESSERA_ASSIGN_OR_RETURN(const JsonValue* const list,
                             Find(key, JsonKind::kArray));
    std::vector<int64_t> counts;
    for (const JsonValue& element : list->elements) {
      const std::optional<int64_t> count = CountOf(element);
      if (!count.has_value()) {
        return Fault(absl::StrCat(
            key, ": expected whole numbers from 0 below 2^63, got ",
            element.kind == JsonKind::kNumber ? element.text
                                              : JsonKindName(element.kind)));
      }
      counts.push_back(*count);
    }
    return counts;
  }

  absl::Status ReadDtype(SafetensorsTensor* tensor) const {
    TESSERA_ASSIGN_OR_RETURN(const JsonValue* const name,
                             Find("dtype", JsonKind::kString));
    tensor->dtype_name = name->text;
    tensor->item_bytes = BytesOf(name->text);
    return absl::OkStatus();
  }
  absl::Status ReadShape(SafetensorsTensor* tensor) const {
    TESSERA_ASSIGN_OR_RETURN(tensor->sizes, ReadCounts("shape"));
    tensor->numel = 1;
    for (const int64_t size : tensor->sizes) {
      if (__builtin_mul_overflow(tensor->numel, size, &tensor->numel)) {
        return Fault(absl::StrCat("shape [", absl::StrJoin(tensor->sizes, ", "),
                                  "]: expected fewer than 2^63 elements"));
      }
    }
    return absl::OkStatus();
  }
  absl::Status ReadOffsets(SafetensorsTensor* tensor) const {
    TESSERA_ASSIGN_OR_RETURN(const std::vector<int64_t> offsets,
                             ReadCounts("data_offsets"));
    if (offsets.size() != 2 || offsets[0] > offsets[1] ||
        offsets[1] > data_bytes_) {
      return Fault(absl::StrCat(
          "data_offsets: expected two, [first byte, end), within the file's ",
          data_bytes_, " bytes of elements, got [",
          absl::StrJoin(offsets, ", "), "]; is the file truncated?"));
    }
    tensor->offset =
        offsets[0];  // counted from where the elements begin; see below
    tensor->bytes = offsets[1] - offsets[0];
    return absl::OkStatus();
  }
  // The size of a dtype that we do not know cannot be checked.
  absl::Status CheckBytes(const SafetensorsTensor& tensor) const {
    const int64_t item = tensor.item_bytes;
    if (item == 0) return absl::OkStatus();
    int64_t expected = 0;
    if (!__builtin_mul_overflow(tensor.numel, item, &expected) &&
        expected == tensor.bytes) {
      return absl::OkStatus();
    }
    return Fault(absl::StrCat("expected ", tensor.numel, " * ", item,
                              " bytes for shape [",
                              absl::StrJoin(tensor.sizes, ", "), "] of ",
                              tensor.dtype_name, ", got ", tensor.bytes));
  }

  const JsonMember& member_;
  const int64_t data_bytes_;
  const std::string& path_;
};

absl::Status ReadMetadata(const JsonValue& value, const std::string& path,
                          SafetensorsHeader* header) {
  if (value.kind != JsonKind::kObject) {
    return absl::DataLossError(absl::StrCat(path, ": ", kMetadata,
                                            ": expected an object, got ",
                                            JsonKindName(value.kind)));
  }
  for (const JsonMember& member : value.members) {
    if (member.value.kind != JsonKind::kString) {
      return absl::DataLossError(absl::StrCat(
          path, ": ", kMetadata, ": ", QuotedName(member.key),
          ": expected a string, got ", JsonKindName(member.value.kind)));
    }
    header->metadata.emplace_back(member.key, member.value.text);
  }
  return absl::OkStatus();
}

// Checks that each tensor begins where the one before it ends. REQUIRES:
// sorted.
absl::Status CheckCovered(const std::vector<SafetensorsTensor>& tensors,
                          int64_t data_bytes, const std::string& path) {
  int64_t end = 0;
  std::string after = "the header";
  for (const SafetensorsTensor& t : tensors) {
    if (t.offset != end) {
      return absl::DataLossError(absl::StrCat(
          path, ": tensor ", QuotedName(t.name), ": data_offsets: expected to ",
          "begin at ", end, ", where ", after, " ends, got ", t.offset,
          t.offset < end ? " (they overlap)" : " (a hole)"));
    }
    end = t.offset + t.bytes;
    after = QuotedName(t.name);
  }
  if (end == data_bytes) return absl::OkStatus();
  return absl::DataLossError(absl::StrCat(
      path, ": expected ", end, " bytes of elements, got ", data_bytes,
      " (what lies behind ", after, " belongs to no tensor)"));
}

}  // namespace

absl::StatusOr<SafetensorsHeader> ParseSafetensorsHeader(
    absl::string_view json, int64_t file_bytes, const std::string& path) {
  if (json.empty() || json[0] != '{') {
    return absl::DataLossError(absl::StrCat(
        path,
        ": is not a safetensors file: its header does not begin with '{'"));
  }
  JsonLimits limits;
  limits.max_depth = kMaxDepth;
  limits.max_bytes = kMaxSafetensorsHeaderBytes;
  limits.max_values = kMaxSafetensorsHeaderValues;
  const auto root = ReadJson(json, absl::StrCat(path, ": header"), limits);
  if (!root.ok()) return absl::DataLossError(root.status().message());
  const int64_t data_begin =
      kSafetensorsLengthBytes + static_cast<int64_t>(json.size());
  const int64_t data_bytes = file_bytes - data_begin;
  SafetensorsHeader header;
  for (const JsonMember& member : root->members) {
    if (member.key == kMetadata) {
      TESSERA_RETURN_IF_ERROR(ReadMetadata(member.value, path, &header));
      continue;
    }
    TESSERA_ASSIGN_OR_RETURN(SafetensorsTensor tensor,
                             TensorReader(member, data_bytes, path).Read());
    header.tensors.push_back(std::move(tensor));
  }
  std::stable_sort(header.tensors.begin(), header.tensors.end(),
                   [](const SafetensorsTensor& a, const SafetensorsTensor& b) {
                     return std::pair(a.offset, a.bytes) <
                            std::pair(b.offset, b.bytes);
                   });
  TESSERA_RETURN_IF_ERROR(CheckCovered(header.tensors, data_bytes, path));
  for (SafetensorsTensor& t : header.tensors) t.offset += data_begin;
  return header;
}

absl::StatusOr<std::string> SafetensorsHeaderText(
    const std::vector<SafetensorsTensor>& tensors, const std::string& path) {
  std::string json =
      absl::StrCat("{", QuoteJson(kMetadata), R"(:{"format":"pt"})");
  int64_t at = 0;
  for (const SafetensorsTensor& tensor : tensors) {
    if (!IsUtf8(tensor.name) || tensor.name == kMetadata) {
      return absl::InvalidArgumentError(
          absl::StrCat(path, ": tensor ", QuotedName(tensor.name),
                       tensor.name == kMetadata ? ": the format keeps that name"
                                                : ": the name is not UTF-8",
                       "; give it another by a rule of names"));
    }
    const int64_t end = at + tensor.bytes;
    absl::StrAppend(&json, ",", QuoteJson(tensor.name), ":{\"dtype\":\"",
                    tensor.dtype_name, "\",\"shape\":[",
                    absl::StrJoin(tensor.sizes, ","), "],\"data_offsets\":[",
                    at, ",", end, "]}");
    at = end;
  }
  json += '}';
  json.append((kHeaderAlign - json.size() % kHeaderAlign) % kHeaderAlign, ' ');
  if (json.size() > size_t{kMaxSafetensorsHeaderBytes}) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, ": the names make a header of ", json.size(),
                     " bytes, expected at most ", kMaxSafetensorsHeaderBytes,
                     "; write more files, or shorter names"));
  }
  const uint64_t length = json.size();
  return std::string(reinterpret_cast<const char*>(&length), sizeof(length)) +
         json;
}

std::string QuotedName(absl::string_view name) {
  return absl::StrCat(
      "'", IsUtf8(name) ? absl::Utf8SafeCEscape(name) : absl::CEscape(name),
      "'");
}

}  // namespace tessera
