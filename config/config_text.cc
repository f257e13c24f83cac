#include "config/config_text.h"

#include <cmath>
#include <map>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/json.h"
#include "config/config.pb.h"
#include "config/reader/field_rules.h"
#include "config/reader/json_keys.h"
#include "config/reader/json_options.pb.h"
#include "google/protobuf/descriptor.h"

namespace tessera {
namespace {

using google::protobuf::FieldDescriptor;
using google::protobuf::Message;

bool MayBeNull(const FieldDescriptor& field) {
  return field.options().GetExtension(proto::json_null);
}

// Returns whether the field is a section that, if absent, does not mean a
// section of defaults.
bool IsAbsentByDefault(const FieldDescriptor& field) {
  return field.options().GetExtension(proto::absent_by_default);
}

// Whether a completed configuration is shown with this field: it is set, or it
// is absent and its default in the schema says what holds. The latter are
// sections that nobody wrote and fields that FillDefaults (config/defaults.h)
// leaves absent because they are not supported.
bool IsShown(const Message& message, const FieldDescriptor& field) {
  const auto& options = field.options();
  if (options.HasExtension(proto::refused) ||
      options.HasExtension(proto::deprecated_for)) {
    return false;
  }
  if (IsSet(message, field)) return true;
  // The first field of a oneof stands for the default.
  const auto* choice = field.containing_oneof();
  if (choice != nullptr &&
      (message.GetReflection()->HasOneof(message, choice) ||
       choice->field(0) != &field)) {
    return false;
  }
  if (field.has_default_value()) return true;
  return IsSection(field) && !IsAbsentByDefault(field);
}

std::vector<const FieldDescriptor*> FieldsOf(const Message& message) {
  std::vector<const FieldDescriptor*> fields;
  for (int i = 0; i < message.GetDescriptor()->field_count(); ++i) {
    fields.push_back(message.GetDescriptor()->field(i));
  }
  return fields;
}

// --------------------------------------------------------------------- JSON

// Returns whether the field is a top-level section: DeepSpeed cannot read a
// null there.
bool IsSectionOfTop(const FieldDescriptor& field) {
  return field.containing_type() == proto::Config::descriptor() &&
         field.message_type() != nullptr;
}

std::string JsonScalar(const Message& message, const FieldDescriptor& field,
                       int index) {
  const auto& reflection = *message.GetReflection();
  const std::string& word = field.options().GetExtension(proto::json_word);
  if (field.cpp_type() == FieldDescriptor::CPPTYPE_STRING) {
    return QuoteJson(
        index < 0 ? reflection.GetString(message, &field)
                  : reflection.GetRepeatedString(message, &field, index));
  }
  if (!word.empty() && field.cpp_type() == FieldDescriptor::CPPTYPE_BOOL) {
    return QuoteJson(word);
  }
  if (!word.empty() && std::isinf(reflection.GetDouble(message, &field))) {
    return QuoteJson(word);
  }
  return ValueText(message, field, index);
}

std::string JsonMap(const Message& message, const FieldDescriptor& field) {
  std::map<std::string, std::string> entries;
  for (int i = 0; i < message.GetReflection()->FieldSize(message, &field);
       ++i) {
    const Message& entry =
        message.GetReflection()->GetRepeatedMessage(message, &field, i);
    const auto* schema = entry.GetDescriptor();
    entries[JsonScalar(entry, *schema->map_key(), -1)] =
        JsonScalar(entry, *schema->map_value(), -1);
  }
  return absl::StrCat(
      "{", absl::StrJoin(entries, ", ", absl::PairFormatter(": ")), "}");
}

std::string JsonObject(const Message& message, const std::string& indent);

std::string JsonValueOf(const Message& message, const FieldDescriptor& field,
                        const std::string& indent) {
  if (field.is_map()) return JsonMap(message, field);
  if (field.is_repeated()) {
    std::vector<std::string> elements;
    const int size = message.GetReflection()->FieldSize(message, &field);
    for (int i = 0; i < size; ++i) {
      elements.push_back(
          field.message_type() == nullptr
              ? JsonScalar(message, field, i)
              : JsonObject(message.GetReflection()->GetRepeatedMessage(
                               message, &field, i),
                           indent));
    }
    return absl::StrCat("[", absl::StrJoin(elements, ", "), "]");
  }
  if (field.message_type() == nullptr) return JsonScalar(message, field, -1);
  const Message& inside = message.GetReflection()->GetMessage(message, &field);
  if (IsFreeForm(field)) {
    return static_cast<const proto::FreeForm&>(inside).json();
  }
  return JsonObject(inside, indent);
}

std::string JsonObject(const Message& message, const std::string& indent) {
  const std::string inner = indent + "  ";
  std::vector<std::string> members;
  for (const FieldDescriptor* field : FieldsOf(message)) {
    const std::string key =
        absl::StrCat(inner, QuoteJson(JsonKeys(*field)[0]), ": ");
    const bool empty_words =
        field->cpp_type() == FieldDescriptor::CPPTYPE_STRING &&
        field->is_repeated();
    if (IsShown(message, *field) || (empty_words && !MayBeNull(*field))) {
      members.push_back(key + JsonValueOf(message, *field, inner));
    } else if (MayBeNull(*field) && !IsSectionOfTop(*field) &&
               !field->options().HasExtension(proto::deprecated_for)) {
      members.push_back(key + "null");
    }
  }
  if (members.empty()) return "{}";
  return absl::StrCat("{\n", absl::StrJoin(members, ",\n"), "\n", indent, "}");
}

// --------------------------------------------------------------------- text

class TextWriter {
 public:
  std::string Write(const Message& message, const Message* written) {
    WriteFields(message, written, "");
    return std::move(text_);
  }

 private:
  void WriteFields(const Message& message, const Message* written,
                   const std::string& indent) {
    for (const FieldDescriptor* field : FieldsOf(message)) {
      if (!IsShown(message, *field)) continue;
      const bool is_written = written != nullptr && IsSet(*written, *field);
      if (field->is_repeated()) {
        WriteRepeated(message, *field, is_written, indent);
      } else if (field->message_type() != nullptr) {
        absl::StrAppend(&text_, indent, field->name(), " {\n");
        WriteFields(message.GetReflection()->GetMessage(message, field),
                    is_written
                        ? &written->GetReflection()->GetMessage(*written, field)
                        : nullptr,
                    indent + "  ");
        absl::StrAppend(&text_, indent, "}\n");
      } else {
        WriteLine(*field, ValueText(message, *field),
                  Mark(message, *field, is_written), indent);
      }
    }
  }

  void WriteRepeated(const Message& message, const FieldDescriptor& field,
                     bool is_written, const std::string& indent) {
    const int size = message.GetReflection()->FieldSize(message, &field);
    for (int i = 0; i < size; ++i) {
      if (field.message_type() != nullptr && !field.is_map()) {
        WriteSection(
            message.GetReflection()->GetRepeatedMessage(message, &field, i),
            field, indent);
        continue;
      }
      const std::string value = ValueText(message, field, i);
      if (field.message_type() != nullptr) {  // a map's entry
        absl::StrAppend(&text_, indent, field.name(), " {\n", value, indent,
                        "}\n");
      } else {
        WriteLine(field, value, is_written ? "" : "  # default", indent);
      }
    }
  }

  // Writes a list's section; its contents are as they were written.
  void WriteSection(const Message& section, const FieldDescriptor& field,
                    const std::string& indent) {
    absl::StrAppend(&text_, indent, field.name(), " {\n");
    WriteFields(section, &section, indent + "  ");
    absl::StrAppend(&text_, indent, "}\n");
  }

  static const char* Mark(const Message& message, const FieldDescriptor& field,
                          bool is_written) {
    if (is_written) return "";
    return IsDefault(message, field) ? "  # default" : "  # resolved";
  }

  void WriteLine(const FieldDescriptor& field, const std::string& value,
                 const char* mark, const std::string& indent) {
    absl::StrAppend(&text_, indent, field.name(), ": ", value, mark, "\n");
  }

  std::string text_;
};

}  // namespace

std::string ConfigToJson(const proto::Config& config) {
  return JsonObject(config, "") + "\n";
}

std::string ConfigToText(const proto::Config& config,
                         const proto::Config& written) {
  return TextWriter().Write(config, &written);
}

}  // namespace tessera
