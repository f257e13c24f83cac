// Reads protobuf text into a message, with positions.
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "config/reader/decimal.h"
#include "config/reader/field_path.h"
#include "config/reader/proto_reader.h"
#include "google/protobuf/descriptor.h"
#include "google/protobuf/io/tokenizer.h"
#include "google/protobuf/io/zero_copy_stream_impl_lite.h"
#include "google/protobuf/text_format.h"

namespace tessera {
namespace {

using google::protobuf::FieldDescriptor;
using google::protobuf::Message;
using google::protobuf::TextFormat;

class FaultCollector : public google::protobuf::io::ErrorCollector {
 public:
  FaultCollector(UnknownKeys unknown_keys, ReadRecord* record)
      : unknown_keys_(unknown_keys), record_(*record) {}
  // Protobuf reports an unknown field as a warning.
  void AddWarning(int line, google::protobuf::io::ColumnNumber column,
                  const std::string& message) override {
    if (unknown_keys_ == UnknownKeys::kNotes) {
      record_.notes.push_back({"", absl::StrCat("ignored: ", message),
                               PositionOf(line, column),
                               /*is_unknown_key=*/true});
      return;
    }
    AddError(line, column, message);
    record_.faults.back().is_unknown_key = true;
  }
  void AddError(int line, google::protobuf::io::ColumnNumber column,
                const std::string& message) override {
    record_.faults.push_back({"", message, PositionOf(line, column)});
  }

 private:
  // Converts positions: protobuf counts from 0.
  static JsonPosition PositionOf(int line, int column) {
    return {line + 1, column + 1};
  }

  const UnknownKeys unknown_keys_;
  ReadRecord& record_;
};

class IgnoredErrors : public google::protobuf::io::ErrorCollector {
 public:
  void AddError(int, google::protobuf::io::ColumnNumber,
                const std::string&) override {}
};

// Finds numbers that a double cannot hold, which protobuf would turn into 0 or
// infinity.
void CheckNumbers(absl::string_view text, FaultCollector* collector) {
  namespace io = google::protobuf::io;
  io::ArrayInputStream stream(text.data(), static_cast<int>(text.size()));
  IgnoredErrors errors;  // the parser reports them
  io::Tokenizer tokenizer(&stream, &errors);
  tokenizer.set_allow_f_after_float(true);
  tokenizer.set_comment_style(io::Tokenizer::SH_COMMENT_STYLE);
  tokenizer.set_require_space_after_number(false);
  while (tokenizer.Next()) {
    const io::Tokenizer::Token& token = tokenizer.current();
    if (token.type != io::Tokenizer::TYPE_FLOAT &&
        token.type != io::Tokenizer::TYPE_INTEGER) {
      continue;
    }
    absl::string_view number = token.text;
    if (token.type == io::Tokenizer::TYPE_FLOAT) {
      if (!absl::ConsumeSuffix(&number, "f")) absl::ConsumeSuffix(&number, "F");
    }
    double value = 0;
    const Decimal decimal = ReadDecimal(number, &value);
    if (decimal == Decimal::kRight || decimal == Decimal::kNone) continue;
    collector->AddError(token.line, token.column, FaultOf(number, decimal));
  }
}

// Notes where the fields of `message` were in the text.
void RecordPositions(const Message& message, TextFormat::ParseInfoTree& tree,
                     const std::string& path, ReadRecord& record) {
  std::vector<const FieldDescriptor*> fields;
  message.GetReflection()->ListFields(message, &fields);
  for (const FieldDescriptor* field : fields) {
    const std::string field_path = MemberPath(path, field->name());
    const auto note = [&](const std::string& at, int index) {
      const TextFormat::ParseLocation location = tree.GetLocation(field, index);
      // For "betas: [1, 2]" protobuf notes one place: element 0 stands for all.
      if (location.line < 0) return;
      record.positions[at] = {location.line + 1, location.column + 1};
    };
    if (field->is_repeated()) {
      const int count = message.GetReflection()->FieldSize(message, field);
      note(field_path, 0);
      for (int i = 0; i < count; ++i) {
        note(ElementPath(field_path, i), 0);
        note(ElementPath(field_path, i), i);
      }
    } else {
      note(field_path, -1);
    }
    if (field->message_type() == nullptr || field->is_map()) continue;
    const auto& reflection = *message.GetReflection();
    if (!field->is_repeated()) {
      TextFormat::ParseInfoTree* nested = tree.GetTreeForNested(field, -1);
      if (nested == nullptr) continue;
      RecordPositions(reflection.GetMessage(message, field), *nested,
                      field_path, record);
      continue;
    }
    for (int i = 0; i < reflection.FieldSize(message, field); ++i) {
      TextFormat::ParseInfoTree* nested = tree.GetTreeForNested(field, i);
      if (nested == nullptr) continue;
      RecordPositions(reflection.GetRepeatedMessage(message, field, i), *nested,
                      ElementPath(field_path, i), record);
    }
  }
}

}  // namespace

void ReadProtoFromText(absl::string_view text, Message* message,
                       ReadRecord* record, UnknownKeys unknown_keys) {
  FaultCollector collector(unknown_keys, record);
  TextFormat::ParseInfoTree tree;
  TextFormat::Parser parser;
  parser.RecordErrorsTo(&collector);
  parser.WriteLocationsTo(&tree);
  parser.AllowUnknownField(true);  // it continues after one, with a warning
  if (!parser.ParseFromString(std::string(text), message)) return;
  CheckNumbers(text, &collector);
  RecordPositions(*message, tree, "", *record);
}

}  // namespace tessera
