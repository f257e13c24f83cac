#include "config/reader/proto_reader.h"

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "absl/strings/escaping.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "config/reader/field_path.h"
#include "config/reader/json_keys.h"
#include "config/reader/json_options.pb.h"
#include "google/protobuf/descriptor.h"

namespace tessera {
namespace {

using google::protobuf::Descriptor;
using google::protobuf::FieldDescriptor;
using google::protobuf::Message;
using google::protobuf::Reflection;

// Returns the string that the field takes beside, or instead of, its own kind;
// or "".
const std::string& Word(const FieldDescriptor& field) {
  return field.options().GetExtension(proto::json_word);
}

bool IsWord(const FieldDescriptor& field, const JsonValue& value) {
  return value.kind == JsonKind::kString && !Word(field).empty() &&
         value.text == Word(field);
}

// Returns whether it is "auto", which stands for a value that the program
// knows, unless it is itself a value of the field.
bool IsAuto(const FieldDescriptor& field, const JsonValue& value) {
  if (value.kind != JsonKind::kString || value.text != "auto") return false;
  const auto& words = field.options().GetRepeatedExtension(proto::one_of);
  return !IsWord(field, value) && !IsFreeForm(field) &&
         !field.options().GetExtension(proto::json_single) &&
         std::find(words.begin(), words.end(), "auto") == words.end();
}

// Returns the kind of JSON value that one value of the field is.
JsonKind KindOf(const FieldDescriptor& field) {
  switch (field.cpp_type()) {
    case FieldDescriptor::CPPTYPE_INT32:
    case FieldDescriptor::CPPTYPE_INT64:
    case FieldDescriptor::CPPTYPE_DOUBLE:
      return JsonKind::kNumber;
    case FieldDescriptor::CPPTYPE_BOOL:
      return JsonKind::kBool;
    case FieldDescriptor::CPPTYPE_STRING:
      return JsonKind::kString;
    case FieldDescriptor::CPPTYPE_MESSAGE:
      return JsonKind::kObject;
    default:
      TESSERA_LOG(FATAL) << "config.proto: no JSON form for the type of "
                         << field.full_name();
      return JsonKind::kNull;
  }
}

bool Fits(const FieldDescriptor& field, const JsonValue& value) {
  if (IsFreeForm(field)) return true;
  const bool only_word =
      field.cpp_type() == FieldDescriptor::CPPTYPE_BOOL && !Word(field).empty();
  return IsWord(field, value) || (value.kind == KindOf(field) && !only_word);
}

// Returns what a JSON value must be to fit one value of the field.
std::string ExpectedBy(const FieldDescriptor& field) {
  const std::string word =
      Word(field).empty() ? "" : absl::StrCat("\"", Word(field), "\"");
  switch (field.cpp_type()) {
    case FieldDescriptor::CPPTYPE_INT32:
    case FieldDescriptor::CPPTYPE_INT64:
      return "an integer";
    case FieldDescriptor::CPPTYPE_BOOL:
      return word.empty() ? "true or false" : word;
    default:
      return absl::StrCat(JsonKindName(KindOf(field)),
                          word.empty() ? "" : " or ", word);
  }
}

// Returns ExpectedBy for all fields that share its key.
std::string Expected(const FieldDescriptor& field) {
  std::string expected = ExpectedBy(field);
  const std::string key = JsonKeys(field)[0];
  const Descriptor& level = *field.containing_type();
  for (int i = 0; i < level.field_count(); ++i) {
    const FieldDescriptor& other = *level.field(i);
    if (&other == &field || !HasJsonKey(other, key)) continue;
    absl::StrAppend(&expected, " or ", ExpectedBy(other));
  }
  return expected;
}

// Returns the field that has this key; of several, the first that fits the
// value, or else the first.
const FieldDescriptor* FieldOf(const Descriptor& level,
                               const JsonMember& member) {
  const FieldDescriptor* first = nullptr;
  for (int i = 0; i < level.field_count(); ++i) {
    const FieldDescriptor& field = *level.field(i);
    if (!HasJsonKey(field, member.key)) continue;
    if (Fits(field, member.value)) return &field;
    if (first == nullptr) first = &field;
  }
  return first;
}

// Formats a value for a message: strings quoted and cut, numbers as written.
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

class JsonToProto {
 public:
  JsonToProto(const Descriptor& schema, UnknownKeys unknown_keys,
              ReadRecord* record)
      : schema_(schema), unknown_keys_(unknown_keys), record_(*record) {}

  void ReadMessage(const JsonValue& value, const std::string& path,
                   Message* message) {
    if (value.kind != JsonKind::kObject) {
      Misfit(path, value, "an object");
      return;
    }
    for (const JsonMember& member : value.members) {
      const FieldDescriptor* field = FieldOf(*message->GetDescriptor(), member);
      if (field != nullptr) {
        ReadMember(member, path, *field, message);
      } else if (!IsCommentKey(member.key)) {
        Unknown(*message->GetDescriptor(), path, member);
      }
    }
  }

 private:
  void Fault(const std::string& path, JsonPosition position, std::string what) {
    record_.faults.push_back(
        {record_.AsWritten(path), std::move(what), position});
    record_.doubtful_paths.push_back(path);
  }

  void ReadMember(const JsonMember& member, const std::string& path,
                  const FieldDescriptor& field, Message* message) {
    const JsonValue& value = member.value;
    const std::string field_path = MemberPath(path, field.name());
    const auto other = record_.positions.find(field_path);
    if (other != record_.positions.end()) {
      std::string what =
          absl::StrCat("the same key as '", record_.AsWritten(field_path),
                       "', whose value is at ", other->second.line, ":",
                       other->second.column, ": write one of them");
      record_.spellings[field_path] =
          MemberPath(record_.AsWritten(path), member.key);
      return Fault(field_path, member.key_position, std::move(what));
    }
    record_.positions[field_path] = value.position;
    if (member.key != field.name()) {
      record_.spellings[field_path] =
          MemberPath(record_.AsWritten(path), member.key);
    }
    const auto& options = field.options();
    if (options.HasExtension(proto::refused)) {
      return Fault(
          field_path, member.key_position,
          absl::StrCat("refused: ", options.GetExtension(proto::refused)));
    }
    if (value.kind == JsonKind::kNull &&
        options.GetExtension(proto::json_null)) {
      return;
    }
    if (IsAuto(field, value)) {
      record_.autos.push_back(field_path);
      return;
    }
    if (value.kind == JsonKind::kBool &&
        options.HasExtension(proto::json_bool)) {
      return ReadBoolOf(value, field_path, field, message);
    }
    if (field.is_map()) return ReadMap(value, field_path, field, message);
    if (field.is_repeated()) {
      return ReadRepeated(value, field_path, field, message);
    }
    ReadOne(value, field_path, field, message);
  }

  // Reads forms such as "zero_optimization": true.
  void ReadBoolOf(const JsonValue& value, const std::string& path,
                  const FieldDescriptor& field, Message* message) {
    const std::string& name = field.options().GetExtension(proto::json_bool);
    Message* inner = message->GetReflection()->MutableMessage(message, &field);
    const FieldDescriptor* number =
        inner->GetDescriptor()->FindFieldByName(name);
    inner->GetReflection()->SetInt32(inner, number, value.boolean ? 1 : 0);
    record_.positions[MemberPath(path, name)] = value.position;
    record_.notes.push_back({record_.AsWritten(path),
                             absl::StrCat("deprecated: write {\"", name,
                                          "\": ", value.boolean ? 1 : 0, "}"),
                             value.position});
  }

  void Misfit(const std::string& path, const JsonValue& value,
              absl::string_view expected) {
    std::string what =
        absl::StrCat("expected ", expected, ", got ", Got(value));
    if (value.kind == JsonKind::kNull) {
      absl::StrAppend(&what, ": leave the key out for its default");
    }
    Fault(path, value.position, std::move(what));
  }

  void Unknown(const Descriptor& level, const std::string& path,
               const JsonMember& member) {
    const std::string key = absl::Utf8SafeCEscape(member.key);
    // A name that exists elsewhere is in the wrong place; otherwise it is
    // misspelt, or another library's.
    const std::string wanted = KeyMeant(member.key);
    const std::string elsewhere =
        HasJsonKey(level, wanted) ? "" : FindKeyElsewhere(schema_, wanted);
    const std::string nearest = FindNearestKey(level, wanted);
    std::string what = "unknown key";
    std::string meant;
    if (!elsewhere.empty()) {
      meant = elsewhere;
      absl::StrAppend(&what, ", did you mean '", elsewhere, "'?");
    } else if (!nearest.empty()) {
      meant = MemberPath(path, nearest);
      absl::StrAppend(&what, ", did you mean '", nearest, "'?");
    }
    const std::string here = MemberPath(path, key);
    const char* const whose = WhoseKey(member.key);
    if (unknown_keys_ == UnknownKeys::kForeign && path.empty() &&
        whose != nullptr) {
      record_.notes.push_back({record_.AsWritten(here),
                               absl::StrCat("ignored: ", whose),
                               member.key_position, /*is_unknown_key=*/true});
      return;
    }
    if (unknown_keys_ == UnknownKeys::kNotes) {
      record_.notes.push_back({record_.AsWritten(here),
                               absl::StrCat("ignored: ", what),
                               member.key_position, /*is_unknown_key=*/true});
      return;
    }
    Fault(here, member.key_position, std::move(what));
    record_.faults.back().is_unknown_key = true;
    if (!meant.empty()) record_.doubtful_paths.push_back(meant);
  }

  void ReadRepeated(const JsonValue& value, const std::string& path,
                    const FieldDescriptor& field, Message* message) {
    if (value.kind != JsonKind::kArray) {
      const bool single = field.options().GetExtension(proto::json_single) &&
                          Fits(field, value);
      if (single) return ReadOne(value, path, field, message);
      Misfit(path, value, "an array");
      return;
    }
    for (size_t i = 0; i < value.elements.size(); ++i) {
      const std::string element_path = ElementPath(path, i);
      record_.positions[element_path] = value.elements[i].position;
      ReadOne(value.elements[i], element_path, field, message);
    }
  }

  // Reads an object whose keys are free, a map of strings to strings.
  void ReadMap(const JsonValue& value, const std::string& path,
               const FieldDescriptor& field, Message* message) {
    if (value.kind != JsonKind::kObject) {
      Misfit(path, value, "an object");
      return;
    }
    for (const JsonMember& member : value.members) {
      if (IsCommentKey(member.key)) continue;
      const std::string member_path =
          MemberPath(path, absl::Utf8SafeCEscape(member.key));
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
    if (!Fits(field, value)) return Misfit(path, value, Expected(field));
    const Reflection& reflection = *message->GetReflection();
    const bool add = field.is_repeated();
    if (IsFreeForm(field)) {
      auto* free = static_cast<proto::FreeForm*>(
          reflection.MutableMessage(message, &field));
      return free->set_json(ToJsonText(value));
    }
    const bool is_word = IsWord(field, value);
    switch (field.cpp_type()) {
      case FieldDescriptor::CPPTYPE_DOUBLE: {
        double number = value.number;
        if (is_word) TESSERA_CHECK(absl::SimpleAtod(value.text, &number));
        return add ? reflection.AddDouble(message, &field, number)
                   : reflection.SetDouble(message, &field, number);
      }
      case FieldDescriptor::CPPTYPE_BOOL: {
        const bool boolean = is_word || value.boolean;
        return add ? reflection.AddBool(message, &field, boolean)
                   : reflection.SetBool(message, &field, boolean);
      }
      case FieldDescriptor::CPPTYPE_STRING:
        return add ? reflection.AddString(message, &field, value.text)
                   : reflection.SetString(message, &field, value.text);
      case FieldDescriptor::CPPTYPE_MESSAGE:
        return ReadMessage(value, path,
                           add ? reflection.AddMessage(message, &field)
                               : reflection.MutableMessage(message, &field));
      default:
        return ReadInteger(value, path, field, message);
    }
  }

  void ReadInteger(const JsonValue& value, const std::string& path,
                   const FieldDescriptor& field, Message* message) {
    const Reflection& reflection = *message->GetReflection();
    const std::optional<int64_t> integer = value.AsInt64();
    const bool narrow = field.cpp_type() == FieldDescriptor::CPPTYPE_INT32;
    const char* const bits =
        narrow ? "an integer of 32 bits" : "an integer of 64 bits";
    if (!integer) {
      const bool too_large = std::abs(value.number) >= 0x1p63;
      return Misfit(path, value, too_large ? bits : Expected(field));
    }
    if (narrow && *integer != static_cast<int32_t>(*integer)) {
      return Misfit(path, value, bits);
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
  const UnknownKeys unknown_keys_;
  ReadRecord& record_;
};

}  // namespace

void ReadProtoFromJson(const JsonValue& root, Message* message,
                       ReadRecord* record, UnknownKeys unknown_keys) {
  JsonToProto(*message->GetDescriptor(), unknown_keys, record)
      .ReadMessage(root, "", message);
}

std::string ReadRecord::AsWritten(const std::string& path) const {
  const auto found = spellings.find(path);
  if (found != spellings.end()) return found->second;
  const size_t last = path.find_last_of(".[");
  if (last == path.npos) return path;
  return AsWritten(path.substr(0, last)) + path.substr(last);
}

}  // namespace tessera
