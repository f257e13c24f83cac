#include "config/describe.h"

#include <algorithm>
#include <map>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "base/check.h"
#include "base/json.h"
#include "config/config.pb.h"
#include "config/options/option_defaults.h"
#include "config/reader/field_rules.h"
#include "config/reader/json_keys.h"
#include "config/reader/json_options.pb.h"
#include "config/schema_data.h"
#include "google/protobuf/descriptor.h"
#include "google/protobuf/descriptor.pb.h"
#include "optim/algorithms/table.h"

namespace tessera {
namespace {

using google::protobuf::Descriptor;
using google::protobuf::DescriptorPool;
using google::protobuf::FieldDescriptor;
using google::protobuf::FieldOptions;

// The schema with its comments, which compiled-in descriptors lack.
const DescriptorPool& CommentedSchema() {
  static const DescriptorPool* const pool = [] {
    google::protobuf::FileDescriptorSet files;
    TESSERA_CHECK(files.ParseFromArray(kSchemaData, kSchemaSize));
    auto* made = new DescriptorPool;
    for (const auto& file : files.file()) {
      TESSERA_CHECK(made->BuildFile(file) != nullptr) << file.name();
    }
    return made;
  }();
  return *pool;
}

std::string OneParagraph(absl::string_view comment) {
  const std::vector<absl::string_view> words =
      absl::StrSplit(comment, absl::ByAnyChar(" \n"), absl::SkipEmpty());
  return absl::StrJoin(words, " ");
}

// Returns the field's comment, or that of its section's message if it has none.
std::string CommentOf(const FieldDescriptor& field) {
  const FieldDescriptor* commented =
      CommentedSchema().FindFieldByName(field.full_name());
  TESSERA_CHECK(commented != nullptr) << field.full_name();
  google::protobuf::SourceLocation location;
  std::string text;
  if (commented->GetSourceLocation(&location)) {
    text = OneParagraph(absl::StrCat(location.leading_comments, " ",
                                     location.trailing_comments));
  }
  if (field.full_name() == "tessera.proto.Optimizer.type") {
    text = absl::StrCat(JoinWords(AlgorithmNames()), ". ", text);
  }
  if (!text.empty() || field.message_type() == nullptr || IsFreeForm(field)) {
    return text;
  }
  if (commented->message_type()->GetSourceLocation(&location)) {
    text = OneParagraph(location.leading_comments);
  }
  return text;
}

std::string KindOfOne(const FieldDescriptor& field) {
  switch (field.cpp_type()) {
    case FieldDescriptor::CPPTYPE_INT32:
    case FieldDescriptor::CPPTYPE_INT64:
      return "integer";
    case FieldDescriptor::CPPTYPE_DOUBLE:
      return "number";
    case FieldDescriptor::CPPTYPE_BOOL:
      return "boolean";
    case FieldDescriptor::CPPTYPE_STRING:
      return "string";
    default:
      return IsFreeForm(field) ? "object of any keys" : "section";
  }
}

std::string KindOf(const FieldDescriptor& field) {
  const std::string& word = field.options().GetExtension(proto::json_word);
  if (field.is_map()) return "strings by name";
  if (field.is_repeated()) {
    const bool single = field.options().GetExtension(proto::json_single);
    return absl::StrCat(single ? absl::StrCat(KindOfOne(field), " or ") : "",
                        "list of ", KindOfOne(field), "s");
  }
  if (word.empty()) return KindOfOne(field);
  return field.cpp_type() == FieldDescriptor::CPPTYPE_BOOL
             ? absl::StrCat("\"", word, "\"")
             : absl::StrCat(KindOfOne(field), " or \"", word, "\"");
}

std::string DefaultOf(const FieldDescriptor& field) {
  if (!field.has_default_value()) {
    return field.options().GetExtension(proto::json_null) ? "null" : "";
  }
  const auto* message =
      google::protobuf::MessageFactory::generated_factory()->GetPrototype(
          field.containing_type());
  return ValueText(*message, field);
}

std::string AllowedBy(const FieldDescriptor& field) {
  const auto& words = field.options().GetRepeatedExtension(proto::one_of);
  if (!words.empty()) {
    return JoinWords({words.begin(), words.end()}) +
           (field.options().GetExtension(proto::any_case) ? ", in any case"
                                                          : "");
  }
  return RangeOf(field);
}

void SetFate(const FieldOptions& options, KeyDescription* key) {
  const auto set = [&](const char* support, const auto& id) {
    if (!options.HasExtension(id)) return;
    key->support = support;
    key->why = options.GetExtension(id);
  };
  set("no effect", proto::no_effect);
  set("not yet", proto::not_yet);
  set("deprecated", proto::deprecated_for);
  set("refused", proto::refused);
}

void Collect(const Descriptor& level, const std::string& prefix,
             const KeyDescription* section, std::vector<KeyDescription>* keys) {
  for (int i = 0; i < level.field_count(); ++i) {
    const FieldDescriptor& field = *level.field(i);
    if (field.options().GetExtension(proto::internal)) continue;
    KeyDescription key;
    const std::vector<std::string> names = JsonKeys(field);
    key.path = prefix + names[0];
    for (size_t n = 1; n < names.size(); ++n) {
      key.other_keys.push_back(prefix + names[n]);
    }
    key.kind = KindOf(field);
    key.default_value = &level == proto::OptimizerParams::descriptor() &&
                                !field.has_default_value()
                            ? DefaultsOfOptimizers(field)
                            : DefaultOf(field);
    key.allowed = AllowedBy(field);
    key.comment = CommentOf(field);
    key.support = "supported";
    if (section != nullptr && section->support != "supported") {
      key.support = section->support;
      key.why = section->why;
    }
    SetFate(field.options(), &key);
    keys->push_back(key);
    // A section, or a list of them.
    if (field.message_type() != nullptr && !field.is_map() &&
        !IsFreeForm(field)) {
      Collect(*field.message_type(), key.path + ".", &key, keys);
    }
  }
}

// Escapes "|", which would end a cell.
std::string Cell(absl::string_view text) {
  return absl::StrReplaceAll(text, {{"|", "\\|"}});
}

std::string FateCell(const KeyDescription& key) {
  return key.why.empty() ? key.support
                         : absl::StrCat(key.support, ": ", key.why);
}

std::string Row(const KeyDescription& key) {
  const size_t dot = key.path.rfind('.');
  std::string name = absl::StrCat(
      "`", dot == key.path.npos ? key.path : key.path.substr(dot + 1), "`");
  for (const std::string& other : key.other_keys) {
    const size_t at = other.rfind('.');
    absl::StrAppend(&name, ", `",
                    at == other.npos ? other : other.substr(at + 1), "`");
  }
  std::string value = key.kind;
  if (!key.allowed.empty()) absl::StrAppend(&value, ", ", key.allowed);
  return absl::StrCat("| ", name, " | ", Cell(value), " | ",
                      Cell(key.default_value), " | ", Cell(FateCell(key)),
                      " | ", Cell(key.comment), " |\n");
}

// ------------------------------------------------------------------- schema

std::string SchemaOf(const Descriptor& level, const std::string& indent);

std::string SchemaType(const FieldDescriptor& field,
                       const std::string& indent) {
  const auto& words = field.options().GetRepeatedExtension(proto::one_of);
  if (!words.empty() && !field.options().GetExtension(proto::any_case)) {
    return absl::StrCat(
        "\"enum\": [",
        absl::StrJoin(words, ", ",
                      [](std::string* out, const std::string& word) {
                        absl::StrAppend(out, QuoteJson(word));
                      }),
        "]");
  }
  if (field.message_type() != nullptr) {  // a list of sections
    return SchemaOf(*field.message_type(), indent);
  }
  std::string type = absl::StrCat("\"type\": ", QuoteJson(KindOfOne(field)));
  const auto limit = [&](const char* name, const auto& id) {
    if (!field.options().HasExtension(id)) return;
    absl::StrAppend(&type, ", \"", name,
                    "\": ", field.options().GetExtension(id));
  };
  limit("minimum", proto::at_least);
  limit("exclusiveMinimum", proto::above);
  limit("maximum", proto::at_most);
  limit("exclusiveMaximum", proto::below);
  return type;
}

// Returns what one field's value may be, as the members of a schema.
std::string SchemaOfValue(const FieldDescriptor& field,
                          const std::string& indent) {
  const std::string& word = field.options().GetExtension(proto::json_word);
  if (IsFreeForm(field)) return "";
  if (field.is_map()) {
    return "\"type\": \"object\", \"additionalProperties\": {\"type\": "
           "\"string\"}";
  }
  if (IsSection(field)) return SchemaOf(*field.message_type(), indent);
  if (field.is_repeated()) {
    const std::string list = absl::StrCat("\"type\": \"array\", \"items\": {",
                                          SchemaType(field, indent), "}");
    return field.options().GetExtension(proto::json_single)
               ? absl::StrCat("\"anyOf\": [{", SchemaType(field, indent),
                              "}, {", list, "}]")
               : list;
  }
  if (word.empty()) return SchemaType(field, indent);
  return field.cpp_type() == FieldDescriptor::CPPTYPE_BOOL
             ? absl::StrCat("\"const\": ", QuoteJson(word))
             : absl::StrCat("\"anyOf\": [{", SchemaType(field, indent),
                            "}, {\"const\": ", QuoteJson(word), "}]");
}

// Returns all that a key may hold: its fields' values, "auto", null, a boolean.
std::string SchemaOfKey(const std::vector<const FieldDescriptor*>& fields,
                        const std::string& indent) {
  std::vector<std::string> choices;
  bool any = false, null = false, boolean = false;
  for (const FieldDescriptor* field : fields) {
    any = any || IsFreeForm(*field);
    null = null || field->options().GetExtension(proto::json_null);
    boolean = boolean || field->options().HasExtension(proto::json_bool);
    choices.push_back(SchemaOfValue(*field, indent + "  "));
  }
  KeyDescription key;
  SetFate(fields[0]->options(), &key);
  std::string words = CommentOf(*fields[0]);
  if (!key.support.empty()) {
    absl::StrAppend(&words, words.empty() ? "" : " ", "(", FateCell(key), ")");
  }
  std::string text = absl::StrCat("\"description\": ", QuoteJson(words));
  if (any) return absl::StrCat(text, ", \"type\": \"object\"");
  choices.push_back("\"const\": \"auto\"");
  if (null) choices.push_back("\"type\": \"null\"");
  if (boolean) choices.push_back("\"type\": \"boolean\"");
  absl::StrAppend(&text, ",\n", indent, "\"anyOf\": [");
  for (size_t i = 0; i < choices.size(); ++i) {
    absl::StrAppend(&text, i == 0 ? "" : ",", "\n", indent, "  {", choices[i],
                    "}");
  }
  return absl::StrCat(text, "]");
}

std::string SchemaOf(const Descriptor& level, const std::string& indent) {
  // This is IsCommentKey of config/reader/json_keys.h.
  constexpr char kComments[] =
      "\"patternProperties\": {\"^(_|//|#|comment$)\": {}},\n";
  std::vector<std::string> order;
  std::map<std::string, std::vector<const FieldDescriptor*>> fields;
  for (int i = 0; i < level.field_count(); ++i) {
    const FieldOptions& options = level.field(i)->options();
    if (options.HasExtension(proto::refused) ||
        options.GetExtension(proto::internal)) {
      continue;
    }
    for (const std::string& key : JsonKeys(*level.field(i))) {
      if (fields[key].empty()) order.push_back(key);
      fields[key].push_back(level.field(i));
    }
  }
  std::string text =
      absl::StrCat("\"type\": \"object\", \"additionalProperties\": false,\n",
                   indent, kComments, indent, "\"properties\": {");
  for (const std::string& key : order) {
    absl::StrAppend(&text, &key == &order[0] ? "" : ",", "\n", indent, "  ",
                    QuoteJson(key), ": {",
                    SchemaOfKey(fields[key], indent + "    "), "}");
  }
  return absl::StrCat(text, "}");
}

}  // namespace

std::vector<KeyDescription> DescribeKeys() {
  std::vector<KeyDescription> keys;
  Collect(*proto::Config::descriptor(), "", nullptr, &keys);
  return keys;
}

std::vector<KeyDescription> FindKeys(absl::string_view key) {
  const auto matches = [&](const std::string& path) {
    return path == key || absl::EndsWith(path, absl::StrCat(".", key));
  };
  std::vector<KeyDescription> found, exact;
  for (KeyDescription& each : DescribeKeys()) {
    const bool other =
        std::any_of(each.other_keys.begin(), each.other_keys.end(), matches);
    if (each.path == key) exact.push_back(each);
    if (matches(each.path) || other) found.push_back(std::move(each));
  }
  return exact.empty() ? found : exact;
}

std::string Explain(const KeyDescription& key) {
  std::string text = absl::StrCat(key.path, "\n  ", key.kind);
  if (!key.allowed.empty()) absl::StrAppend(&text, ", ", key.allowed);
  if (!key.default_value.empty()) {
    absl::StrAppend(&text, "; default ", key.default_value);
  }
  absl::StrAppend(&text, "\n");
  if (!key.other_keys.empty()) {
    absl::StrAppend(&text, "  also written ",
                    absl::StrJoin(key.other_keys, ", "), "\n");
  }
  if (!key.comment.empty()) absl::StrAppend(&text, "  ", key.comment, "\n");
  absl::StrAppend(&text, "  ", FateCell(key), "\n");
  return text;
}

std::string KeyTables() {
  constexpr char kHead[] =
      "\n| key | value | default | support | |\n|---|---|---|---|---|\n";
  const std::vector<KeyDescription> keys = DescribeKeys();
  std::string text = "### Top level\n";
  absl::StrAppend(&text, kHead);
  for (const KeyDescription& key : keys) {
    if (!absl::StrContains(key.path, '.')) absl::StrAppend(&text, Row(key));
  }
  for (const KeyDescription& section : keys) {
    std::string rows;
    for (const KeyDescription& key : keys) {
      const size_t dot = key.path.rfind('.');
      if (dot == section.path.size() &&
          key.path.substr(0, dot) == section.path) {
        absl::StrAppend(&rows, Row(key));
      }
    }
    if (rows.empty()) continue;
    absl::StrAppend(&text, "\n### ", section.path, "\n", kHead, rows);
  }
  return text;
}

std::string JsonSchema() {
  return absl::StrCat(
      "{\n  \"$schema\": \"http://json-schema.org/draft-07/schema#\",\n"
      "  \"title\": \"Tessera configuration\",\n  ",
      SchemaOf(*proto::Config::descriptor(), "  "), "\n}\n");
}

}  // namespace tessera
