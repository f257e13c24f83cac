#include "config/config.h"

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/file.h"
#include "base/status.h"
#include "config/faults.h"
#include "config/json_reader.h"
#include "config/proto_reader.h"
#include "config/validate.h"

namespace tessera {
namespace {

constexpr int64_t kMaxFileBytes = 16 << 20;

std::vector<ConfigFault> Resolve(int world_size, const ReadRecord& record,
                                 proto::Config* config) {
  Faults faults(&record);
  if (world_size < 1) {
    faults.Add("world_size", "expected at least 1, got ", world_size);
    return faults.Take();
  }
  ResolveBatch(world_size, config, &faults);
  ResolveGradients(config, &faults);
  ResolveOptimizer(config, &faults);
  ResolveSharding(world_size, config, &faults);
  ResolvePrecision(config, &faults);
  CheckCommunication(config->communication(), &faults);
  return faults.Take();
}

std::string Format(const ConfigFault& fault, absl::string_view file_name) {
  std::string text;
  if (fault.position) {
    absl::StrAppend(&text, FormatPosition(file_name, *fault.position), ": ");
  } else if (!file_name.empty()) {
    absl::StrAppend(&text, file_name, ": ");
  }
  if (!fault.path.empty()) absl::StrAppend(&text, fault.path, ": ");
  return absl::StrCat(text, fault.what);
}

// One line with all faults.
absl::Status ErrorOf(const std::vector<ConfigFault>& faults,
                     absl::string_view file_name) {
  return absl::InvalidArgumentError(absl::StrJoin(
      faults, "; ", [&](std::string* out, const ConfigFault& fault) {
        absl::StrAppend(out, Format(fault, file_name));
      }));
}

absl::StatusOr<proto::Config> Finish(proto::Config config, ReadRecord record,
                                     absl::string_view file_name,
                                     int world_size) {
  std::vector<ConfigFault> faults = std::move(record.faults);
  for (ConfigFault& fault : Resolve(world_size, record, &config)) {
    faults.push_back(std::move(fault));
  }
  if (faults.empty()) return config;
  return ErrorOf(faults, file_name);
}

bool IsTextProto(absl::string_view file_name) {
  return absl::EndsWith(file_name, ".textproto") ||
         absl::EndsWith(file_name, ".pbtxt");
}

absl::Status Read(absl::string_view text, absl::string_view file_name,
                  proto::Config* config, ReadRecord* record) {
  if (IsTextProto(file_name)) {
    ReadProtoFromText(text, config, record);
    // Half a message: nothing sensible can be said about the rest.
    if (!record->faults.empty()) record->doubtful_paths.push_back("");
    return absl::OkStatus();
  }
  TESSERA_ASSIGN_OR_RETURN(const JsonValue root, ReadJson(text, file_name));
  ReadProtoFromJson(root, config, record);
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<proto::Communication> LoadCommunication(
    const std::string& path) {
  TESSERA_ASSIGN_OR_RETURN(const std::string text,
                           ReadWholeFile(path, kMaxFileBytes));
  proto::Config config;
  ReadRecord record;
  TESSERA_RETURN_IF_ERROR(Read(text, path, &config, &record));
  std::vector<ConfigFault> faults;
  for (const ConfigFault& fault : record.faults) {
    // Text that is no message at all has the empty path.
    if (PathsOverlap(fault.path, "communication")) faults.push_back(fault);
  }
  Faults found(&record);
  CheckCommunication(config.communication(), &found);
  for (ConfigFault& fault : found.Take()) faults.push_back(std::move(fault));
  if (!faults.empty()) return ErrorOf(faults, path);
  return config.communication();
}

absl::StatusOr<proto::Config> LoadConfig(const std::string& path,
                                         int world_size) {
  if (path.empty()) {
    return absl::InvalidArgumentError("the configuration's path is empty");
  }
  TESSERA_ASSIGN_OR_RETURN(const std::string text,
                           ReadWholeFile(path, kMaxFileBytes));
  return ParseConfig(text, path, world_size);
}

absl::StatusOr<proto::Config> ParseConfig(absl::string_view text,
                                          absl::string_view file_name,
                                          int world_size) {
  proto::Config config;
  ReadRecord record;
  TESSERA_RETURN_IF_ERROR(Read(text, file_name, &config, &record));
  return Finish(std::move(config), std::move(record), file_name, world_size);
}

absl::StatusOr<proto::Config> ResolveConfig(const proto::Config& config,
                                            int world_size) {
  return Finish(config, ReadRecord(), "", world_size);
}

}  // namespace tessera
