#include "config/defaults.h"

#include "base/check.h"
#include "config/reader/json_options.pb.h"
#include "google/protobuf/descriptor.h"

namespace tessera {
namespace {

using google::protobuf::FieldDescriptor;
using google::protobuf::Message;
using google::protobuf::Reflection;

void SetDefault(const FieldDescriptor& field, Message* message) {
  const Reflection& reflection = *message->GetReflection();
  switch (field.cpp_type()) {
    case FieldDescriptor::CPPTYPE_INT32:
      return reflection.SetInt32(message, &field, field.default_value_int32());
    case FieldDescriptor::CPPTYPE_INT64:
      return reflection.SetInt64(message, &field, field.default_value_int64());
    case FieldDescriptor::CPPTYPE_DOUBLE:
      return reflection.SetDouble(message, &field,
                                  field.default_value_double());
    case FieldDescriptor::CPPTYPE_BOOL:
      return reflection.SetBool(message, &field, field.default_value_bool());
    case FieldDescriptor::CPPTYPE_STRING:
      return reflection.SetString(message, &field,
                                  field.default_value_string());
    default:
      TESSERA_LOG(FATAL) << "config.proto: no defaults of the type of "
                         << field.full_name();
  }
}

bool IsSupported(const FieldDescriptor& field) {
  const auto& options = field.options();
  return !options.HasExtension(proto::no_effect) &&
         !options.HasExtension(proto::not_yet);
}

}  // namespace

void FillDefaults(Message* message) {
  const Reflection& reflection = *message->GetReflection();
  for (int i = 0; i < message->GetDescriptor()->field_count(); ++i) {
    const FieldDescriptor& field = *message->GetDescriptor()->field(i);
    if (!field.has_default_value() || !IsSupported(field)) continue;
    const auto* const oneof = field.containing_oneof();
    const bool present = oneof != nullptr
                             ? reflection.HasOneof(*message, oneof)
                             : reflection.HasField(*message, &field);
    if (!present) SetDefault(field, message);
  }
}

}  // namespace tessera
