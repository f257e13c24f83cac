// Writes a completed configuration as text, with every default.
#ifndef CONFIG_CONFIG_TEXT_H_
#define CONFIG_CONFIG_TEXT_H_

#include <string>

namespace tessera {

namespace proto {
class Config;
}

// Returns one JSON object in DeepSpeed's shape, with the first of each field's
// keys, and null where that is the default. Reading it gives the same text
// again.
std::string ConfigToJson(const proto::Config& config);

// Returns protobuf text format. A value that `written` lacks is followed by "#
// default", one that differs from `written` by "# resolved".
std::string ConfigToText(const proto::Config& config,
                         const proto::Config& written);

}  // namespace tessera
#endif  // CONFIG_CONFIG_TEXT_H_
