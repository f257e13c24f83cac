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

absl::Status Fault(absl::string_view override_text, absl::string_view what) {
  return absl::InvalidArgumentError(
      absl::StrCat("--set ", override_text, ": ", what));
}

void MarkAsOverride(JsonValue* value) {
  value->position = kOverride;
  for (JsonValue& element : value->elements) MarkAsOverride(&element);
  for (JsonMember& member : value->members) {
    member.key_position = kOverride;
    MarkAsOverride(&member.value);
  }
}

// Words need no quotes on a command line, where a shell would take them away,
// and what `is_text` may look like a number (communication.nccl, job_name).
absl::StatusOr<JsonValue> ReadValue(absl::string_view key,
                                    absl::string_view text, bool is_text) {
  absl::StatusOr<JsonValue> read = ReadJson(text, absl::StrCat("--set ", key));
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
  MarkAsOverride(&*read);
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

// Returns the member of that key, made if it is absent.
JsonMember& MemberOf(const Descriptor* level, absl::string_view key,
                     JsonValue* object) {
  for (JsonMember& member : object->members) {
    if (IsSameKey(level, member.key, key)) return member;
  }
  JsonMember& member = object->members.emplace_back();
  member.key = std::string(key);
  member.key_position = member.value.position = kOverride;
  member.value.kind = JsonKind::kObject;
  return member;
}

absl::Status Apply(absl::string_view text, const Descriptor& schema,
                   JsonValue* root) {
  const size_t equals = text.find('=');
  const absl::string_view path = text.substr(0, equals);
  const std::vector<absl::string_view> keys = absl::StrSplit(path, '.');
  for (const absl::string_view key : keys) {
    if (key.empty() || equals == text.npos) {
      return Fault(text, "expected KEY=VALUE, as zero_optimization.stage=1");
    }
  }
  const Descriptor* level = &schema;
  const FieldDescriptor* parent = nullptr;
  JsonValue* object = root;
  for (size_t i = 0; i + 1 < keys.size(); ++i) {
    JsonMember& member = MemberOf(level, keys[i], object);
    if (member.value.kind == JsonKind::kNull) {
      member.value.kind = JsonKind::kObject;
    }
    if (member.value.kind != JsonKind::kObject) {
      return Fault(
          text, absl::StrCat(keys[i], " is ", JsonKindName(member.value.kind),
                             " there, expected an object"));
    }
    parent = FieldOf(level, keys[i]);
    level = Inside(parent);
    object = &member.value;
  }
  const bool is_text = IsText(parent, level, keys.back());
  TESSERA_ASSIGN_OR_RETURN(JsonValue value,
                           ReadValue(path, text.substr(equals + 1), is_text));
  JsonMember& member = MemberOf(level, keys.back(), object);
  member.key = std::string(keys.back());
  member.key_position = kOverride;
  member.value = std::move(value);
  return absl::OkStatus();
}

}  // namespace

absl::Status ApplyOverrides(const std::vector<std::string>& overrides,
                            const Descriptor& schema, JsonValue* root) {
  // The reader says that a configuration has to be an object.
  if (root->kind != JsonKind::kObject) return absl::OkStatus();
  for (const std::string& each : overrides) {
    TESSERA_RETURN_IF_ERROR(Apply(each, schema, root));
  }
  return absl::OkStatus();
}

}  // namespace tessera
