// The schema with its comments: a serialized FileDescriptorSet, made by protoc
// when this is built.
#ifndef CONFIG_SCHEMA_DATA_H_
#define CONFIG_SCHEMA_DATA_H_

namespace tessera {

extern const unsigned char kSchemaData[];
extern const int kSchemaSize;

}  // namespace tessera
#endif  // CONFIG_SCHEMA_DATA_H_
