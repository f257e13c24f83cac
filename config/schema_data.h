// Holds the schema with its comments: a serialized FileDescriptorSet, which
// protoc makes during the build.
#ifndef CONFIG_SCHEMA_DATA_H_
#define CONFIG_SCHEMA_DATA_H_

namespace tessera {

extern const unsigned char kSchemaData[];
extern const int kSchemaSize;

}  // namespace tessera
#endif  // CONFIG_SCHEMA_DATA_H_
