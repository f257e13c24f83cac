#include "config/reader/field_path.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/check.h"
#include "config/reader/field_rules.h"
#include "google/protobuf/descriptor.h"
#include "google/protobuf/field_mask.pb.h"
#include "google/protobuf/util/field_mask_util.h"

namespace tessera {
namespace {

using google::protobuf::FieldDescriptor;
using google::protobuf::Message;

const FieldDescriptor& Find(const Message& message, absl::string_view name) {
  const FieldDescriptor* field =
      message.GetDescriptor()->FindFieldByName(std::string(name));
  TESSERA_CHECK(field != nullptr) << name;
  return *field;
}

// Returns the message that holds the last field of the path, and sets `path` to
// that field; nullptr if it is not set.
const Message* Holder(const Message& message, absl::string_view* path) {
  const Message* holder = &message;
  for (size_t dot; (dot = path->find('.')) != path->npos;) {
    const FieldDescriptor& field = Find(*holder, path->substr(0, dot));
    if (!holder->GetReflection()->HasField(*holder, &field)) return nullptr;
    holder = &holder->GetReflection()->GetMessage(*holder, &field);
    *path = path->substr(dot + 1);
  }
  return holder;
}

}  // namespace

std::string MemberPath(absl::string_view path, absl::string_view field) {
  return path.empty() ? std::string(field) : absl::StrCat(path, ".", field);
}

std::string ElementPath(absl::string_view path, size_t index) {
  return absl::StrCat(path, "[", index, "]");
}

bool HasField(const Message& message, absl::string_view path) {
  const Message* holder = Holder(message, &path);
  return holder != nullptr && IsSet(*holder, Find(*holder, path));
}

std::string FieldText(const Message& message, absl::string_view path) {
  const Message* holder = Holder(message, &path);
  TESSERA_CHECK(holder != nullptr) << path;
  const FieldDescriptor& field = Find(*holder, path);
  if (!field.is_repeated()) return ValueText(*holder, field);
  std::string text;
  for (int i = 0; i < holder->GetReflection()->FieldSize(*holder, &field);
       ++i) {
    absl::StrAppend(&text, i == 0 ? "" : ", ", ValueText(*holder, field, i));
  }
  return text;
}

void CopyField(const Message& from, absl::string_view path, Message* to) {
  google::protobuf::FieldMask mask;
  mask.add_paths(std::string(path));
  google::protobuf::util::FieldMaskUtil::MergeMessageTo(
      from, mask, google::protobuf::util::FieldMaskUtil::MergeOptions(), to);
}

}  // namespace tessera
