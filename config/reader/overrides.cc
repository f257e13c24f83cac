#include "config/reader/overrides.h"

#include <utility>

#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "base/status.h"
#include "config/reader/json_keys.h"

namespace tessera {
namespace {

using google::protobuf::Descriptor;
using google::protobuf::FieldDescriptor;

// Who sets a key.
struct Setter {
  absl::string_view name;  // for messages
  JsonPosition position;
  bool replaces = false;  // a key that is there already
};
constexpr Setter kSet = {"--set ", kOverride, /*replaces=*/true};
constexpr Setter kProgram = {"TrainingConfig: ", kInCode, /*replaces=*/false};

absl::Status Fault(const Setter& setter, absl::string_view text,
                   absl::string_view what) {
  return absl::InvalidArgumentError(
      absl::StrCat(setter.name, text, ": ", what));
}

void SetPositions(JsonPosition position, JsonValue* value) {
  value->position = position;
  for (JsonValue& element : value->elements) SetPositions(position, &element);
  for (JsonMember& member : value->members) {
    member.key_position = position;
    SetPositions(position, &member.value);
  }
}

// Words need no quotes on a command line, where a shell would take them away,
// and what `is_text` may look like a number (communication.nccl, job_name).
absl::StatusOr<JsonValue> ReadValue(const Setter& setter, absl::string_view key,
                                    absl::string_view text, bool is_text) {
  absl::StatusOr<JsonValue> read =
      ReadJson(text, absl::StrCat(setter.name, key));
  if (!read.ok() && !text.empty() &&
      absl::StrContains("[{\"", text.substr(0, 1))) {
    return read.status();
  }
  const bool is_bare = !read.ok() || read->kind == JsonKind::kNumber ||
                       read->kind == JsonKind::kBool;
  if (!read.ok() || (is_text && is_bare)) {
    read = JsonValue();
    read->kind = JsonKind::kString;
    read->text = std::string(text);
  }
  SetPositions(setter.position, &*read);
  return read;
}

// Returns whether both keys are names of one field of `level`, which is null
// where the schema does not know the level.
bool IsSameKey(const Descriptor* level, absl::string_view a,
               absl::string_view b) {
  if (a == b) return true;
  for (int i = 0; level != nullptr && i < level->field_count(); ++i) {
    if (HasJsonKey(*level->field(i), a) && HasJsonKey(*level->field(i), b)) {
      return true;
    }
  }
  return false;
}

// Returns `level`'s field of that key, or null.
const FieldDescriptor* FieldOf(const Descriptor* level, absl::string_view key) {
  for (int i = 0; level != nullptr && i < level->field_count(); ++i) {
    if (HasJsonKey(*level->field(i), key)) return level->field(i);
  }
  return nullptr;
}

// Returns the message type of the field, or null.
const Descriptor* Inside(const FieldDescriptor* field) {
  const bool is_message = field != nullptr && !field->is_repeated() &&
                          field->cpp_type() == FieldDescriptor::CPPTYPE_MESSAGE;
  return is_message ? field->message_type() : nullptr;
}

// Returns whether values of `level`'s key are text, and nothing else: those of
// strings, and of the keys of the map `parent`.
bool IsText(const FieldDescriptor* parent, const Descriptor* level,
            absl::string_view key) {
  if (parent != nullptr && parent->is_map()) return true;
  bool is_text = false;
  for (int i = 0; level != nullptr && i < level->field_count(); ++i) {
    const FieldDescriptor& field = *level->field(i);
    if (!HasJsonKey(field, key)) continue;
    is_text = !field.is_repeated() &&
              field.cpp_type() == FieldDescriptor::CPPTYPE_STRING;
    if (!is_text) return false;
  }
  return is_text;
}

// Returns the member of that key, or null.
JsonMember* FindMember(const Descriptor* level, absl::string_view key,
                       JsonValue* object) {
  for (JsonMember& member : object->members) {
    if (IsSameKey(level, member.key, key)) return &member;
  }
  return nullptr;
}

// Returns the member of that key, made if it is absent.
JsonMember& MemberOf(const Setter& setter, const Descriptor* level,
                     absl::string_view key, JsonValue* object) {
  if (JsonMember* const found = FindMember(level, key, object)) return *found;
  JsonMember& member = object->members.emplace_back();
  member.key = std::string(key);
  member.key_position = member.value.position = setter.position;
  member.value.kind = JsonKind::kObject;
  return member;
}

absl::Status Apply(const Setter& setter, absl::string_view text,
                   const Descriptor& schema, JsonValue* root) {
  const size_t equals = text.find('=');
  const absl::string_view path = text.substr(0, equals);
  const std::vector<absl::string_view> keys = absl::StrSplit(path, '.');
  for (const absl::string_view key : keys) {
    if (key.empty() || equals == text.npos) {
      return Fault(setter, text,
                   "expected KEY=VALUE, as zero_optimization.stage=1");
    }
  }
  const Descriptor* level = &schema;
  const FieldDescriptor* parent = nullptr;
  JsonValue* object = root;
  for (size_t i = 0; i + 1 < keys.size(); ++i) {
    JsonMember& member = MemberOf(setter, level, keys[i], object);
    if (member.value.kind == JsonKind::kNull) {
      member.value.kind = JsonKind::kObject;
    }
    if (member.value.kind != JsonKind::kObject) {
      return Fault(
          setter, text,
          absl::StrCat(keys[i], " is ", JsonKindName(member.value.kind),
                       " there, expected an object"));
    }
    parent = FieldOf(level, keys[i]);
    level = Inside(parent);
    object = &member.value;
  }
  const bool is_text = IsText(parent, level, keys.back());
  TESSERA_ASSIGN_OR_RETURN(
      JsonValue value,
      ReadValue(setter, path, text.substr(equals + 1), is_text));
  const JsonMember* const before = FindMember(level, keys.back(), object);
  if (before != nullptr && !setter.replaces) {
    return Fault(
        setter, text,
        absl::StrCat("json has this key, too, at ", before->key_position.line,
                     ":", before->key_position.column,
                     "; leave one of them out"));
  }
  JsonMember& member = MemberOf(setter, level, keys.back(), object);
  member.key = std::string(keys.back());
  member.key_position = setter.position;
  member.value = std::move(value);
  return absl::OkStatus();
}

absl::Status ApplyAll(const Setter& setter,
                      const std::vector<std::string>& texts,
                      const Descriptor& schema, JsonValue* root) {
  // The reader says that a configuration has to be an object.
  if (root->kind != JsonKind::kObject) return absl::OkStatus();
  for (const std::string& each : texts) {
    TESSERA_RETURN_IF_ERROR(Apply(setter, each, schema, root));
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status ApplyOverrides(const std::vector<std::string>& overrides,
                            const Descriptor& schema, JsonValue* root) {
  return ApplyAll(kSet, overrides, schema, root);
}

absl::Status AddInCode(const std::vector<std::string>& keys,
                       const Descriptor& schema, JsonValue* root) {
  return ApplyAll(kProgram, keys, schema, root);
}

}  // namespace tessera
