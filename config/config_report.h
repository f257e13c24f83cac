// ReadConfig: a configuration with all that there is to say about it, for tools
// and tests; programs use config/config.h.
#ifndef CONFIG_CONFIG_REPORT_H_
#define CONFIG_CONFIG_REPORT_H_

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "config/auto_values.h"
#include "config/config.h"
#include "config/config.pb.h"
#include "config/reader/proto_reader.h"

namespace tessera {

// ConfigReport is what there is to say about a file.
struct ConfigReport {
  proto::Config config;   // completed; only partly where there are faults
  proto::Config written;  // what the file says
  std::vector<ConfigFault> faults;  // in the order of the file
  // Keys without effect, deprecated forms, "auto" that became a default,
  // unknown keys that are ignored.
  std::vector<ConfigFault> notes;
  ReadRecord record;
};

// Reads and checks text. Returns an error only if `text` is no JSON. LOCAL.
absl::StatusOr<ConfigReport> ReadConfig(absl::string_view text,
                                        absl::string_view file_name,
                                        int world_size,
                                        const AutoValues& values = {},
                                        bool ignore_unknown = false,
                                        const ConfigOverrides& overrides = {});
// Returns the file's text; NotFound, or OutOfRange above 16 MiB. LOCAL.
absl::StatusOr<std::string> ReadConfigFile(const std::string& path);
// Returns "file:line:column: path: what", or "--set path: what" for what an
// override has set.
std::string FormatFault(const ConfigFault& fault, absl::string_view file_name);

}  // namespace tessera
#endif  // CONFIG_CONFIG_REPORT_H_
