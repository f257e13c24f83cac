#include "config/reader/field_rules.h"

#include <cmath>
#include <cstdint>

#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "config/reader/field_path.h"
#include "config/reader/json_keys.h"
#include "config/reader/json_options.pb.h"
#include "config/reader/json_reader.h"
#include "config/reader/utf8.h"
#include "google/protobuf/text_format.h"

namespace tessera {
namespace {

using google::protobuf::FieldDescriptor;
using google::protobuf::FieldOptions;
using google::protobuf::Message;
using google::protobuf::Reflection;

// Returns whether the field is a list of sections.
bool IsList(const FieldDescriptor& field) {
  return field.message_type() != nullptr && field.is_repeated() &&
         !field.is_map();
}

// Calls each(path, section) for what is inside a section or a list of them.
template <typename Each>
void ForEachInside(const std::string& here, const Message& message,
                   const FieldDescriptor& field, const Each& each) {
  const Reflection& reflection = *message.GetReflection();
  if (!IsList(field)) return each(here, reflection.GetMessage(message, &field));
  for (int i = 0; i < reflection.FieldSize(message, &field); ++i) {
    each(absl::StrCat(here, "[", i, "]"),
         reflection.GetRepeatedMessage(message, &field, i));
  }
}

std::vector<const FieldDescriptor*> SetFields(const Message& message) {
  std::vector<const FieldDescriptor*> fields;
  message.GetReflection()->ListFields(message, &fields);
  return fields;
}

const Message& Inside(const Message& message, const FieldDescriptor& field) {
  return message.GetReflection()->GetMessage(message, &field);
}

// ------------------------------------------------------------ ranges, words

double NumberOf(const Message& message, const FieldDescriptor& field,
                int index) {
  const Reflection& reflection = *message.GetReflection();
  const bool single = index < 0;
  switch (field.cpp_type()) {
    case FieldDescriptor::CPPTYPE_INT32:
      return single ? reflection.GetInt32(message, &field)
                    : reflection.GetRepeatedInt32(message, &field, index);
    case FieldDescriptor::CPPTYPE_INT64:
      return static_cast<double>(
          single ? reflection.GetInt64(message, &field)
                 : reflection.GetRepeatedInt64(message, &field, index));
    default:
      return single ? reflection.GetDouble(message, &field)
                    : reflection.GetRepeatedDouble(message, &field, index);
  }
}

bool InRange(double value, const FieldOptions& options) {
  const auto limit = [&](const auto& id) { return options.GetExtension(id); };
  const auto has = [&](const auto& id) { return options.HasExtension(id); };
  return std::isfinite(value) &&
         (!has(proto::at_least) || value >= limit(proto::at_least)) &&
         (!has(proto::above) || value > limit(proto::above)) &&
         (!has(proto::at_most) || value <= limit(proto::at_most)) &&
         (!has(proto::below) || value < limit(proto::below));
}

// Returns whether the value becomes neither 0 nor infinite as a float32:
// training computes in that, unless a module's parameters are float64.
bool IsFloat32(double value) {
  return value == 0 || (std::isfinite(static_cast<float>(value)) &&
                        static_cast<float>(value) != 0);
}

// Checks one value; the `path` of a list's value has its index.
void CheckNumber(const std::string& path, const Message& message,
                 const FieldDescriptor& field, int index, Faults* faults) {
  std::string range = RangeOf(field);
  if (range.empty()) {
    const bool may_be_infinite = field.options().HasExtension(proto::json_word);
    if (field.cpp_type() != FieldDescriptor::CPPTYPE_DOUBLE ||
        may_be_infinite) {
      return;
    }
    range = "a finite number";
  }
  const FieldOptions& options = field.options();
  const double value = NumberOf(message, field, index);
  const bool said =
      value == -1 && options.HasExtension(proto::instead_of_minus_one);
  if (!InRange(value, options)) {
    faults->Add(
        path, "expected ", range, ", got ", ValueText(message, field, index),
        said ? absl::StrCat(": ",
                            options.GetExtension(proto::instead_of_minus_one))
             : "");
  } else if (field.cpp_type() == FieldDescriptor::CPPTYPE_DOUBLE &&
             !IsFloat32(value)) {
    faults->Add(path, "expected a number that float32 holds, got ",
                ValueText(message, field, index), ", which is ",
                value < 1 && value > -1 ? "0" : "infinite", " there");
  }
}

void CheckWord(const std::string& path, const FieldDescriptor& field, int index,
               Message* message, Faults* faults) {
  const FieldOptions& options = field.options();
  const Reflection& reflection = *message->GetReflection();
  const std::string value =
      index < 0 ? reflection.GetString(*message, &field)
                : reflection.GetRepeatedString(*message, &field, index);
  if (!IsUtf8(value)) {
    faults->Add(path, "expected UTF-8");
    return;
  }
  const auto& extension = options.GetRepeatedExtension(proto::one_of);
  if (extension.empty()) return;
  const std::vector<std::string> words(extension.begin(), extension.end());
  for (const std::string& word : words) {
    if (value == word) return;
    if (!options.GetExtension(proto::any_case) ||
        !absl::EqualsIgnoreCase(value, word)) {
      continue;
    }
    if (index < 0) {
      reflection.SetString(message, &field, word);
    } else {
      reflection.SetRepeatedString(message, &field, index, word);
    }
    return;
  }
  faults->AddUnknown(path, value, JoinWords(words).c_str(), words);
}

void CheckValue(const std::string& path, const FieldDescriptor& field,
                int index, Message* message, Faults* faults) {
  switch (field.cpp_type()) {
    case FieldDescriptor::CPPTYPE_INT32:
    case FieldDescriptor::CPPTYPE_INT64:
    case FieldDescriptor::CPPTYPE_DOUBLE:
      return CheckNumber(path, *message, field, index, faults);
    case FieldDescriptor::CPPTYPE_STRING:
      return CheckWord(path, field, index, message, faults);
    default:
      return;
  }
}

void CheckFreeForm(const std::string& path, const Message& block,
                   Faults* faults) {
  const auto json =
      ReadJson(static_cast<const proto::FreeForm&>(block).json(), "");
  if (!json.ok() || json->kind != JsonKind::kObject) {
    faults->Add(path, "expected a JSON object");
  }
}

// Returns whether it is false in a boolean that stands for a word, which is as
// if absent.
bool IsUnsetWord(const Message& message, const FieldDescriptor& field) {
  return field.cpp_type() == FieldDescriptor::CPPTYPE_BOOL &&
         field.options().HasExtension(proto::json_word) &&
         !message.GetReflection()->GetBool(message, &field);
}

void CheckFieldsAt(const std::string& path, Message* message, Faults* faults) {
  for (const FieldDescriptor* field : SetFields(*message)) {
    const std::string here = MemberPath(path, field->name());
    const FieldOptions& options = field->options();
    if (options.HasExtension(proto::refused)) {
      faults->Add(here, "refused: ", options.GetExtension(proto::refused));
    } else if (IsFreeForm(*field)) {
      CheckFreeForm(here, Inside(*message, *field), faults);
    } else if (IsUnsetWord(*message, *field)) {
      message->GetReflection()->ClearField(message, field);
    } else if (IsSection(*field)) {
      CheckFieldsAt(here,
                    message->GetReflection()->MutableMessage(message, field),
                    faults);
    } else if (IsList(*field)) {
      const Reflection& reflection = *message->GetReflection();
      for (int i = 0; i < reflection.FieldSize(*message, field); ++i) {
        CheckFieldsAt(absl::StrCat(here, "[", i, "]"),
                      reflection.MutableRepeatedMessage(message, field, i),
                      faults);
      }
    } else if (field->is_repeated() && !field->is_map()) {
      const int size = message->GetReflection()->FieldSize(*message, field);
      for (int i = 0; i < size; ++i) {
        CheckValue(absl::StrCat(here, "[", i, "]"), *field, i, message, faults);
      }
    } else if (!field->is_repeated()) {
      CheckValue(here, *field, -1, message, faults);
    }
  }
}

// --------------------------------------------------------- ineffective keys

// Returns whether a block is off by its own {"enabled": false}. A block that is
// not read is on only if it says so. `field` is the block's in `message`.
bool IsOff(const Message& message, const FieldDescriptor& field) {
  const Message& block = Inside(message, field);
  if (IsFreeForm(field)) {
    const auto json =
        ReadJson(static_cast<const proto::FreeForm&>(block).json(), "");
    if (!json.ok() || json->kind != JsonKind::kObject) return false;
    const JsonValue* enabled = json->Find("enabled");
    return enabled == nullptr || ToJsonText(*enabled) == "false";
  }
  const std::string& by = field.options().GetExtension(proto::off_by);
  const FieldDescriptor* off_by =
      block.GetDescriptor()->FindFieldByName(by.empty() ? "enabled" : by);
  if (off_by == nullptr) return false;
  return off_by->cpp_type() == FieldDescriptor::CPPTYPE_INT64
             ? NumberOf(block, *off_by, -1) <= 1
             : IsDefault(block, *off_by);
}

// Returns whether a value requests nothing: a count of 0, or the default.
bool IsInert(const Message& message, const FieldDescriptor& field) {
  if (IsDefault(message, field)) return true;
  return field.has_default_value() &&
         field.cpp_type() == FieldDescriptor::CPPTYPE_INT64 &&
         NumberOf(message, field, -1) <=
             static_cast<double>(field.default_value_int64());
}

void NoteIneffectiveKeysAt(const std::string& path, const Message& message,
                           Faults* faults) {
  for (const FieldDescriptor* field : SetFields(message)) {
    const std::string here = MemberPath(path, field->name());
    const FieldOptions& options = field->options();
    const bool is_block =
        field->message_type() != nullptr && !field->is_repeated();
    if (!faults->IsWritten(here) &&
        (faults->is_of_file() || IsDefault(message, *field))) {
      continue;
    }
    if (options.HasExtension(proto::no_effect)) {
      if (is_block && !IsFreeForm(*field) && IsOff(message, *field)) continue;
      faults->Note(here,
                   "has no effect: ", options.GetExtension(proto::no_effect));
      if (IsSection(*field)) {
        NoteIneffectiveKeysAt(here, Inside(message, *field), faults);
      }
    } else if (options.HasExtension(proto::deprecated_for)) {
      faults->Note(here, "deprecated: write ",
                   options.GetExtension(proto::deprecated_for));
    } else if (IsSection(*field) || IsList(*field)) {
      ForEachInside(here, message, *field,
                    [&](const std::string& path, const Message& inside) {
                      NoteIneffectiveKeysAt(path, inside, faults);
                    });
    }
  }
}

void MissingFeaturesAt(const std::string& path, const Message& message,
                       std::vector<std::string>* missing) {
  for (const FieldDescriptor* field : SetFields(message)) {
    const std::string here = MemberPath(path, field->name());
    const FieldOptions& options = field->options();
    const std::string& what = options.GetExtension(proto::not_yet);
    if (what.empty()) {
      if (IsList(*field)) {
        ForEachInside(here, message, *field,
                      [&](const std::string& path, const Message& inside) {
                        MissingFeaturesAt(path, inside, missing);
                      });
      } else if (IsSection(*field) && !options.HasExtension(proto::no_effect) &&
                 !IsOff(message, *field)) {
        MissingFeaturesAt(here, Inside(message, *field), missing);
      }
    } else if (field->is_repeated()) {
      missing->push_back(absl::StrCat(here, ": ", what));
    } else if (field->message_type() != nullptr) {
      if (IsOff(message, *field)) continue;
      missing->push_back(absl::StrCat(here, ": ", what));
    } else if (!IsInert(message, *field)) {
      missing->push_back(
          absl::StrCat(here, ": ", ValueText(message, *field), ": ", what));
    }
  }
}

}  // namespace

void CheckFields(Message* message, Faults* faults) {
  CheckFieldsAt("", message, faults);
}

void NoteIneffectiveKeys(const Message& message, Faults* faults) {
  NoteIneffectiveKeysAt("", message, faults);
}

std::vector<std::string> MissingFeatures(const Message& message) {
  std::vector<std::string> missing;
  MissingFeaturesAt("", message, &missing);
  return missing;
}

bool IsSet(const Message& message, const FieldDescriptor& field) {
  const Reflection& reflection = *message.GetReflection();
  return field.is_repeated() ? reflection.FieldSize(message, &field) > 0
                             : reflection.HasField(message, &field);
}

bool IsDefault(const Message& message, const FieldDescriptor& field) {
  if (field.is_repeated() || field.message_type() != nullptr ||
      !field.has_default_value()) {
    return false;
  }
  const std::unique_ptr<Message> other(message.New());
  return ValueText(message, field) == ValueText(*other, field);
}

bool IsSection(const FieldDescriptor& field) {
  return field.message_type() != nullptr && !field.is_repeated() &&
         !IsFreeForm(field);
}

std::string RangeOf(const FieldDescriptor& field) {
  const FieldOptions& options = field.options();
  const auto limit = [&](const char* words, const auto& id) -> std::string {
    if (!options.HasExtension(id)) return "";
    return absl::StrCat(words, options.GetExtension(id));
  };
  const bool finite = field.cpp_type() == FieldDescriptor::CPPTYPE_DOUBLE;
  std::string low =
      limit(finite ? "of at least " : "at least ", proto::at_least);
  if (low.empty()) low = limit("above ", proto::above);
  std::string high = limit("at most ", proto::at_most);
  if (high.empty()) high = limit("less than ", proto::below);
  if (high.empty()) {
    return low.empty() || !finite ? low : absl::StrCat("a finite number ", low);
  }
  if (low.empty())
    return finite ? absl::StrCat("a finite number ", high) : high;
  if (options.HasExtension(proto::at_least) &&
      options.HasExtension(proto::at_most)) {
    return absl::StrCat(options.GetExtension(proto::at_least), " to ",
                        options.GetExtension(proto::at_most));
  }
  absl::string_view words = low;
  absl::ConsumePrefix(&words, "of ");
  return absl::StrCat(words, " and ", high);
}

std::string JoinWords(const std::vector<std::string>& words) {
  if (words.size() < 2) return absl::StrJoin(words, "");
  return absl::StrCat(absl::StrJoin(words.begin(), words.end() - 1, ", "),
                      " or ", words.back());
}

std::string ValueText(const Message& message, const FieldDescriptor& field,
                      int index) {
  std::string text;
  google::protobuf::TextFormat::PrintFieldValueToString(message, &field, index,
                                                        &text);
  return text;
}

}  // namespace tessera
