#include "config/proto_reader.h"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <numeric>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "google/protobuf/descriptor.h"
#include "google/protobuf/io/tokenizer.h"
#include "google/protobuf/text_format.h"

namespace tessera {
namespace {

using google::protobuf::Descriptor;
using google::protobuf::FieldDescriptor;
using google::protobuf::Message;
using google::protobuf::Reflection;
using google::protobuf::TextFormat;

std::string Join(absl::string_view path, absl::string_view key) {
  return path.empty() ? std::string(key) : absl::StrCat(path, ".", key);
}

std::string AtIndex(absl::string_view path, size_t index) {
  return absl::StrCat(path, "[", index, "]");
}

// What a JSON value must be to fit one value of the field.
absl::string_view Expected(const FieldDescriptor& field) {
  switch (field.cpp_type()) {
    case FieldDescriptor::CPPTYPE_INT32:
    case FieldDescriptor::CPPTYPE_INT64:
      return "an integer";
    case FieldDescriptor::CPPTYPE_DOUBLE:
      return "a number";
    case FieldDescriptor::CPPTYPE_BOOL:
      return "true or false";
    case FieldDescriptor::CPPTYPE_STRING:
      return "a string";
    case FieldDescriptor::CPPTYPE_MESSAGE:
      return "an object";
    default:
      TESSERA_LOG(FATAL) << "config.proto: no JSON form for the type of "
                         << field.full_name();
      return "";
  }
}

// A value as a message shows it: strings quoted and cut, numbers as written.
std::string Got(const JsonValue& value) {
  constexpr size_t kMaxShown = 40;
  switch (value.kind) {
    case JsonKind::kString: {
      std::string shown =
          absl::Utf8SafeCEscape(value.text.substr(0, kMaxShown));
      if (value.text.size() > kMaxShown) shown += "...";
      return absl::StrCat("the string \"", shown, "\"");
    }
    case JsonKind::kNumber:
      return value.text.substr(0, kMaxShown);
    case JsonKind::kBool:
      return value.boolean ? "true" : "false";
    default:
      return std::string(JsonKindName(value.kind));
  }
}

// The path of a field named `name` anywhere in the schema, "" if there is none.
std::string FindAnywhere(const Descriptor& schema, absl::string_view name,
                         const std::string& path) {
  for (int i = 0; i < schema.field_count(); ++i) {
    const FieldDescriptor& field = *schema.field(i);
    const std::string field_path = Join(path, field.name());
    if (field.name() == name) return field_path;
    if (field.message_type() == nullptr || field.is_map()) continue;
    std::string found = FindAnywhere(*field.message_type(), name, field_path);
    if (!found.empty()) return found;
  }
  return "";
}

// The nearest name among the fields of `schema`, "" if none is near: at most
// one character in three may differ.
std::string FindNearest(const Descriptor& schema, absl::string_view name) {
  std::string best;
  int best_distance = std::numeric_limits<int>::max();
  for (int i = 0; i < schema.field_count(); ++i) {
    const std::string& candidate = schema.field(i)->name();
    const int longest =
        static_cast<int>(std::max(candidate.size(), name.size()));
    const int distance = EditDistance(name, candidate);
    if (distance < best_distance && 3 * distance <= longest) {
      best = candidate;
      best_distance = distance;
    }
  }
  return best;
}

class JsonToProto {
 public:
  JsonToProto(const Descriptor& schema, ReadRecord* record)
      : schema_(schema), record_(*record) {}

  void ReadMessage(const JsonValue& value, const std::string& path,
                   Message* message) {
    if (value.kind != JsonKind::kObject) {
      Misfit(path, value, "an object");
      return;
    }
    for (const JsonMember& member : value.members) {
      const FieldDescriptor* field =
          message->GetDescriptor()->FindFieldByName(member.key);
      if (field == nullptr) {
        Unknown(*message->GetDescriptor(), path, member);
        continue;
      }
      const std::string field_path = Join(path, member.key);
      record_.positions[field_path] = member.value.position;
      if (field->is_map()) {
        ReadMap(member.value, field_path, *field, message);
      } else if (field->is_repeated()) {
        ReadRepeated(member.value, field_path, *field, message);
      } else {
        ReadOne(member.value, field_path, *field, message);
      }
    }
  }

 private:
  void Fault(const std::string& path, JsonPosition position, std::string what) {
    record_.faults.push_back({path, std::move(what), position});
    record_.doubtful_paths.push_back(path);
  }

  void Misfit(const std::string& path, const JsonValue& value,
              absl::string_view expected) {
    std::string what =
        absl::StrCat("expected ", expected, ", got ", Got(value));
    if (value.kind == JsonKind::kString && value.text == "auto") {
      absl::StrAppend(&what, ", which is not resolved here: write the value");
    } else if (value.kind == JsonKind::kNull) {
      absl::StrAppend(&what, ": leave the key out for its default");
    }
    Fault(path, value.position, std::move(what));
  }

  void Unknown(const Descriptor& level, const std::string& path,
               const JsonMember& member) {
    const std::string key = absl::Utf8SafeCEscape(member.key);
    // A name that exists elsewhere was put in the wrong place; otherwise it is
    // misspelt.
    const std::string elsewhere = FindAnywhere(schema_, member.key, "");
    const std::string nearest = FindNearest(level, member.key);
    std::string what = "unknown key";
    std::string meant;
    if (!elsewhere.empty()) {
      meant = elsewhere;
      absl::StrAppend(&what, ", did you mean '", elsewhere, "'?");
    } else if (!nearest.empty()) {
      meant = Join(path, nearest);
      absl::StrAppend(&what, ", did you mean '", nearest, "'?");
    }
    Fault(Join(path, key), member.key_position, std::move(what));
    if (!meant.empty()) record_.doubtful_paths.push_back(meant);
  }

  void ReadRepeated(const JsonValue& value, const std::string& path,
                    const FieldDescriptor& field, Message* message) {
    if (value.kind != JsonKind::kArray) {
      Misfit(path, value, "an array");
      return;
    }
    for (size_t i = 0; i < value.elements.size(); ++i) {
      const std::string element_path = AtIndex(path, i);
      record_.positions[element_path] = value.elements[i].position;
      ReadOne(value.elements[i], element_path, field, message);
    }
  }

  // An object whose keys are free; of strings to strings.
  void ReadMap(const JsonValue& value, const std::string& path,
               const FieldDescriptor& field, Message* message) {
    if (value.kind != JsonKind::kObject) {
      Misfit(path, value, "an object");
      return;
    }
    for (const JsonMember& member : value.members) {
      const std::string member_path =
          Join(path, absl::Utf8SafeCEscape(member.key));
      record_.positions[member_path] = member.value.position;
      if (member.value.kind != JsonKind::kString) {
        Misfit(member_path, member.value, "a string");
        continue;
      }
      Message* entry = message->GetReflection()->AddMessage(message, &field);
      const Descriptor& schema = *entry->GetDescriptor();
      const Reflection& reflection = *entry->GetReflection();
      reflection.SetString(entry, schema.map_key(), member.key);
      reflection.SetString(entry, schema.map_value(), member.value.text);
    }
  }

  // Sets a single field, or adds to a repeated one.
  void ReadOne(const JsonValue& value, const std::string& path,
               const FieldDescriptor& field, Message* message) {
    const Reflection& reflection = *message->GetReflection();
    const bool add = field.is_repeated();
    switch (field.cpp_type()) {
      case FieldDescriptor::CPPTYPE_INT32:
      case FieldDescriptor::CPPTYPE_INT64:
        return ReadInteger(value, path, field, message);
      case FieldDescriptor::CPPTYPE_DOUBLE:
        if (value.kind != JsonKind::kNumber) break;
        return add ? reflection.AddDouble(message, &field, value.number)
                   : reflection.SetDouble(message, &field, value.number);
      case FieldDescriptor::CPPTYPE_BOOL:
        if (value.kind != JsonKind::kBool) break;
        return add ? reflection.AddBool(message, &field, value.boolean)
                   : reflection.SetBool(message, &field, value.boolean);
      case FieldDescriptor::CPPTYPE_STRING:
        if (value.kind != JsonKind::kString) break;
        return add ? reflection.AddString(message, &field, value.text)
                   : reflection.SetString(message, &field, value.text);
      case FieldDescriptor::CPPTYPE_MESSAGE:
        return ReadMessage(value, path,
                           add ? reflection.AddMessage(message, &field)
                               : reflection.MutableMessage(message, &field));
      default:
        break;  // Expected() refuses the schema
    }
    Misfit(path, value, Expected(field));
  }

  void ReadInteger(const JsonValue& value, const std::string& path,
                   const FieldDescriptor& field, Message* message) {
    const Reflection& reflection = *message->GetReflection();
    const std::optional<int64_t> integer = value.AsInt64();
    const bool narrow = field.cpp_type() == FieldDescriptor::CPPTYPE_INT32;
    if (!integer) return Misfit(path, value, Expected(field));
    if (narrow && *integer != static_cast<int32_t>(*integer)) {
      return Misfit(path, value, "an integer of 32 bits");
    }
    if (narrow) {
      const int32_t small = static_cast<int32_t>(*integer);
      field.is_repeated() ? reflection.AddInt32(message, &field, small)
                          : reflection.SetInt32(message, &field, small);
    } else {
      field.is_repeated() ? reflection.AddInt64(message, &field, *integer)
                          : reflection.SetInt64(message, &field, *integer);
    }
  }

  const Descriptor& schema_;  // of the root message
  ReadRecord& record_;
};

class FaultCollector : public google::protobuf::io::ErrorCollector {
 public:
  explicit FaultCollector(ReadRecord* record) : record_(*record) {}
  // protobuf counts from 0.
  void AddError(int line, google::protobuf::io::ColumnNumber column,
                const std::string& message) override {
    record_.faults.push_back({"", message, JsonPosition{line + 1, column + 1}});
  }

 private:
  ReadRecord& record_;
};

// Notes where the fields of `message` were in the text.
void RecordPositions(const Message& message, TextFormat::ParseInfoTree& tree,
                     const std::string& path, ReadRecord& record) {
  std::vector<const FieldDescriptor*> fields;
  message.GetReflection()->ListFields(message, &fields);
  for (const FieldDescriptor* field : fields) {
    const std::string field_path = Join(path, field->name());
    const auto note = [&](const std::string& at, int index) {
      const TextFormat::ParseLocation location = tree.GetLocation(field, index);
      // Of "betas: [1, 2]" protobuf notes one place: element 0 stands for all.
      if (location.line < 0) return;
      record.positions[at] = {location.line + 1, location.column + 1};
    };
    if (field->is_repeated()) {
      const int count = message.GetReflection()->FieldSize(message, field);
      note(field_path, 0);
      for (int i = 0; i < count; ++i) {
        note(AtIndex(field_path, i), 0);
        note(AtIndex(field_path, i), i);
      }
    } else {
      note(field_path, -1);
    }
    if (field->message_type() == nullptr || field->is_repeated()) continue;
    TextFormat::ParseInfoTree* nested = tree.GetTreeForNested(field, -1);
    if (nested == nullptr) continue;
    RecordPositions(message.GetReflection()->GetMessage(message, field),
                    *nested, field_path, record);
  }
}

}  // namespace

void ReadProtoFromJson(const JsonValue& root, Message* message,
                       ReadRecord* record) {
  JsonToProto(*message->GetDescriptor(), record).ReadMessage(root, "", message);
}

void ReadProtoFromText(absl::string_view text, Message* message,
                       ReadRecord* record) {
  FaultCollector collector(record);
  TextFormat::ParseInfoTree tree;
  TextFormat::Parser parser;
  parser.RecordErrorsTo(&collector);
  parser.WriteLocationsTo(&tree);
  if (!parser.ParseFromString(std::string(text), message)) return;
  RecordPositions(*message, tree, "", *record);
}

int EditDistance(absl::string_view a, absl::string_view b) {
  // row[j]: the distance of the part of `a` read so far to b[0, j).
  std::vector<int> row(b.size() + 1);
  std::iota(row.begin(), row.end(), 0);
  for (size_t i = 0; i < a.size(); ++i) {
    int diagonal = row[0];
    row[0] = static_cast<int>(i) + 1;
    for (size_t j = 0; j < b.size(); ++j) {
      const int replaced = diagonal + (a[i] == b[j] ? 0 : 1);
      diagonal = row[j + 1];
      row[j + 1] = std::min({replaced, row[j] + 1, row[j + 1] + 1});
    }
  }
  return row[b.size()];
}

}  // namespace tessera
