// Strings that ranks gather: the records that Gloo carries
// (comm/gloo/text_record.h), and those of hosts in one
// (comm/hierarchical/packed_texts.h).
#include <algorithm>
#include <string>
#include <vector>

#include "base/check.h"
#include "comm/gloo/text_record.h"
#include "comm/hierarchical/packed_texts.h"
#include "tests/fuzz/targets.h"

namespace tessera {
namespace {

constexpr size_t kTexts = 3;

// Records have one size, whatever a peer sends.
void ReadRecord(absl::string_view input) {
  std::string record(input.substr(0, TextRecord::kBytes));
  record.resize(TextRecord::kBytes);
  std::string text;
  const absl::StatusOr<int64_t> bytes = TextRecord::Read(record.data(), &text);
  if (!bytes.ok()) return;
  TESSERA_CHECK(*bytes >= 0 && *bytes <= TextRecord::kMaxTextBytes);
  const auto shown = static_cast<int64_t>(text.size());
  TESSERA_CHECK_EQ(shown, std::min(*bytes, TextRecord::kInlineBytes));
  if (shown < *bytes) return;
  std::string again(TextRecord::kBytes, 0);
  TextRecord::Write(text, again.data());
  TESSERA_CHECK(again.compare(0, 8 + shown, record, 0, 8 + shown) == 0);
}

void ReadPacked(absl::string_view input) {
  const absl::StatusOr<std::vector<std::string>> texts =
      UnpackTexts(input, kTexts);
  if (!texts.ok()) return;
  TESSERA_CHECK_EQ(texts->size(), kTexts);
  TESSERA_CHECK(PackTexts(*texts) == input);
}

std::string Record(const std::string& text) {
  std::string record(TextRecord::kBytes, 0);
  TextRecord::Write(text, record.data());
  std::string read;
  TESSERA_CHECK(TextRecord::Read(record.data(), &read).ok());
  return record;
}

std::string Packed(const std::vector<std::string>& texts) {
  const std::string packed = PackTexts(texts);
  TESSERA_CHECK(UnpackTexts(packed, kTexts).ok());
  return packed;
}

}  // namespace

FuzzTarget TextRecordTarget() {
  return {"text_record",
          ReadRecord,
          {Record(""), Record("rank 1 failed"), Record(std::string(248, 'x')),
           Record(std::string(5000, 'y'))},
          100000};
}

FuzzTarget PackedTextsTarget() {
  return {"packed_texts",
          ReadPacked,
          {Packed({"", "", ""}), Packed({"a", "bc", "def"}),
           Packed({std::string(100, 'z'), "", "x"})},
          100000};
}

}  // namespace tessera
