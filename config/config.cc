#include "config/config.h"

#include <sys/stat.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/synchronization/mutex.h"
#include "base/file.h"
#include "base/log.h"
#include "base/status.h"
#include "config/config_report.h"
#include "config/reader/faults.h"
#include "config/reader/field_rules.h"
#include "config/reader/json_reader.h"
#include "config/reader/overrides.h"
#include "config/reader/proto_reader.h"
#include "config/resolve_autos.h"
#include "config/validate.h"
#include "optim/algorithms/table.h"

namespace tessera {
namespace {

constexpr int64_t kMaxFileBytes = 16 << 20;

int RanksOf(int64_t count) {
  constexpr int64_t kMost = std::numeric_limits<int>::max();
  return static_cast<int>(std::clamp<int64_t>(count, 1, kMost));
}

// The order matters, since each part may look only at what is complete:
//  - Notes on keys without effect come first: they are about what was written,
//    and the later parts remove deprecated keys and add defaults.
//  - dtype names and autos are resolved before CheckFields: another name of a
//    dtype is no fault, and the value of "auto" is checked as if it had been
//    written.
//  - The scheduler follows the optimizer, whose rate it takes if it has none.
// No part ends at its first fault: a user gets all faults of a file at once,
// and Faults drops those about a path that has one already.
void Resolve(int world_size, const AutoValues& values, ConfigReport* report) {
  Faults faults(&report->record);
  proto::Config* config = &report->config;
  if (world_size < 1) {
    faults.Add("world_size", "expected at least 1, got ", world_size);
    report->faults = faults.Take();
    return;
  }
  NoteIneffectiveKeys(*config, &faults);
  NameDtypes(config);
  const int data_ranks = DataParallelRanks(world_size, *config, &faults);
  ResolveAutos(report->record, values, data_ranks, config, &faults);
  CheckFields(config, &faults);
  ResolveBatch(data_ranks, config, &faults);
  ResolvePipeline(config, &faults);
  ResolveGradients(config, &faults);
  ResolveOptimizer(config, &faults);
  ResolveScheduler(config, &faults);
  ResolveLearningRateScaling(config, &faults);
  ResolveSharding(data_ranks, config, &faults);
  ResolvePrecision(config, &faults);
  ResolveStepInBackward(config, &faults);
  CheckCommunication(config->communication(), &faults);
  CheckTrace(world_size, config->trace(), &faults);
  NoteHistograms(*config, &faults);
  report->faults = faults.Take();
  report->notes = faults.TakeNotes();
}

// Sorts faults in the order of the file; those without a position come last.
void Sort(std::vector<ConfigFault>* faults) {
  const auto place = [](const ConfigFault& fault) {
    constexpr int kLast = std::numeric_limits<int>::max();
    return fault.position
               ? std::pair(fault.position->line, fault.position->column)
               : std::pair(kLast, kLast);
  };
  std::stable_sort(faults->begin(), faults->end(),
                   [&](const ConfigFault& a, const ConfigFault& b) {
                     return place(a) < place(b);
                   });
}

void Prepend(const std::vector<ConfigFault>& first,
             std::vector<ConfigFault>* faults) {
  faults->insert(faults->begin(), first.begin(), first.end());
  Sort(faults);
}

// Returns one line with all faults.
absl::Status ErrorOf(const std::vector<ConfigFault>& faults,
                     absl::string_view file_name) {
  return absl::InvalidArgumentError(absl::StrJoin(
      faults, "; ", [&](std::string* out, const ConfigFault& fault) {
        absl::StrAppend(out, FormatFault(fault, file_name));
      }));
}

absl::StatusOr<proto::Config> ConfigOf(const ConfigReport& report,
                                       absl::string_view file_name) {
  if (!report.faults.empty()) return ErrorOf(report.faults, file_name);
  return report.config;
}

// Logs each note once in a process, however often its file is read.
void LogNotes(const std::vector<ConfigFault>& notes,
              absl::string_view file_name) {
  static absl::Mutex mutex(absl::kConstInit);
  static auto* const logged = new std::set<std::string>;
  absl::MutexLock lock(&mutex);
  for (const ConfigFault& note : notes) {
    std::string text = FormatFault(note, file_name);
    if (!logged->insert(text).second) continue;
    TESSERA_LOG_RANK0(WARNING) << text;
  }
}

bool IsTextProto(absl::string_view file_name) {
  return absl::EndsWith(file_name, ".textproto") ||
         absl::EndsWith(file_name, ".pbtxt");
}

// What a configuration is read from.
struct Source {
  absl::string_view text;
  // For messages; its ending selects the format.
  absl::string_view file_name;
  bool ignore_unknown = false;
  const ConfigOverrides& overrides;
  // Keys of a TrainingConfig, whose `json` is the text.
  ConfigOverrides in_code = {};
};

absl::Status ReadOnce(const Source& source, UnknownKeys unknown_keys,
                      proto::Config* config, ReadRecord* record) {
  const absl::string_view file_name = source.file_name;
  if (IsTextProto(file_name)) {
    if (!source.overrides.empty()) {
      return absl::InvalidArgumentError(
          absl::StrCat(file_name, ": --set ", source.overrides[0],
                       ": expected a configuration in JSON"));
    }
    ReadProtoFromText(source.text, config, record, unknown_keys);
    // The message is incomplete, so nothing sensible can be said about the
    // rest.
    if (!record->faults.empty()) record->doubtful_paths.push_back("");
    return absl::OkStatus();
  }
  std::vector<JsonDuplicate> duplicates;
  TESSERA_ASSIGN_OR_RETURN(JsonValue root, ReadJson(source.text, file_name,
                                                    JsonLimits(), &duplicates));
  TESSERA_RETURN_IF_ERROR(
      AddInCode(source.in_code, *config->GetDescriptor(), &root));
  TESSERA_RETURN_IF_ERROR(
      ApplyOverrides(source.overrides, *config->GetDescriptor(), &root));
  ReadProtoFromJson(root, config, record, unknown_keys);
  for (const JsonDuplicate& each : duplicates) {
    record->faults.push_back(
        {each.path,
         absl::StrCat("duplicate key, first at ", each.first.line, ":",
                      each.first.column),
         each.position});
  }
  return absl::OkStatus();
}

// Reads in two passes: whether unknown keys are faults may come after them in
// the file.
absl::Status Read(const Source& source, proto::Config* config,
                  ReadRecord* record) {
  UnknownKeys keys = UnknownKeys::kNotes;
  if (!source.ignore_unknown) {
    TESSERA_RETURN_IF_ERROR(
        ReadOnce(source, UnknownKeys::kForeign, config, record));
    if (!config->has_unknown_keys()) return absl::OkStatus();
    if (config->unknown_keys() != "warn") keys = UnknownKeys::kFaults;
    config->Clear();
    *record = ReadRecord();
  }
  return ReadOnce(source, keys, config, record);
}

// Annotates `error` of what is in `path`. `--config=<(...)` makes a pipe:
// whoever reads it first gets its text, and the other ranks of a job find it
// empty, or get a part of it.
absl::Status OfFile(const absl::Status& error, absl::string_view file_name) {
  const std::string path(file_name);
  struct stat info;
  if (error.ok() || stat(path.c_str(), &info) != 0 ||
      !(S_ISFIFO(info.st_mode) || S_ISSOCK(info.st_mode))) {
    return error;
  }
  return absl::Status(
      error.code(),
      absl::StrCat(error.message(), "; ", path,
                   " is a pipe, whose text comes once, and each rank and its "
                   "launcher read the configuration: write it to a file"));
}

// Appends the hint to the last unknown key, so that it appears once.
void SayHowToIgnore(absl::string_view file_name,
                    std::vector<ConfigFault>* faults) {
  const auto last = std::find_if(
      faults->rbegin(), faults->rend(),
      [](const ConfigFault& fault) { return fault.is_unknown_key; });
  if (last == faults->rend()) return;
  absl::StrAppend(&last->what, " (",
                  IsTextProto(file_name) ? "unknown_keys" : "\"unknown_keys\"",
                  ": \"warn\" ignores such keys)");
}

}  // namespace

std::string FormatFault(const ConfigFault& fault, absl::string_view file_name) {
  std::string text;
  if (fault.position && fault.position->line == kOverride.line) {
    text = fault.position->column == kInCode.column ? "TrainingConfig: "
                                                    : "--set ";
  } else if (fault.position) {
    absl::StrAppend(&text, FormatPosition(file_name, *fault.position), ": ");
  } else if (!file_name.empty()) {
    absl::StrAppend(&text, file_name, ": ");
  }
  if (!fault.path.empty()) absl::StrAppend(&text, fault.path, ": ");
  return absl::StrCat(text, fault.what);
}

namespace {

absl::StatusOr<proto::Communication> ReadCommunication(const Source& source) {
  proto::Config config;
  ReadRecord record;
  const absl::Status read = Read(source, &config, &record);
  if (!read.ok()) return OfFile(read, source.file_name);
  std::vector<ConfigFault> faults;
  for (const ConfigFault& fault : record.faults) {
    // A text that is no message at all has the empty path.
    if (PathsOverlap(fault.path, "communication")) faults.push_back(fault);
  }
  SayHowToIgnore(source.file_name, &faults);
  proto::Config section;
  *section.mutable_communication() = config.communication();
  Faults found(&record);
  CheckFields(&section, &found);
  CheckCommunication(section.communication(), &found);
  for (ConfigFault& fault : found.Take()) faults.push_back(std::move(fault));
  if (!faults.empty()) {
    return OfFile(ErrorOf(faults, source.file_name), source.file_name);
  }
  return section.communication();
}

absl::StatusOr<ConfigReport> ReportOf(const Source& source, int world_size,
                                      const AutoValues& values) {
  ConfigReport report;
  TESSERA_RETURN_IF_ERROR(Read(source, &report.config, &report.record));
  report.written = report.config;
  Resolve(world_size, values, &report);
  Prepend(report.record.faults, &report.faults);
  SayHowToIgnore(source.file_name, &report.faults);
  Prepend(report.record.notes, &report.notes);
  return report;
}

Source SourceOf(const TrainingConfig& config,
                const ConfigOverrides& overrides) {
  return {.text = config.json.empty() ? absl::string_view("{}")
                                      : absl::string_view(config.json),
          .file_name = "TrainingConfig",
          .overrides = overrides,
          .in_code = KeysOf(config)};
}

}  // namespace

absl::StatusOr<proto::Communication> ParseCommunication(
    absl::string_view text, absl::string_view file_name, bool ignore_unknown,
    const ConfigOverrides& overrides) {
  return ReadCommunication({text, file_name, ignore_unknown, overrides});
}

absl::StatusOr<proto::Communication> LoadCommunication(
    const std::string& path, bool ignore_unknown,
    const ConfigOverrides& overrides) {
  TESSERA_ASSIGN_OR_RETURN(const std::string text,
                           ReadWholeFile(path, kMaxFileBytes));
  return ParseCommunication(text, path, ignore_unknown, overrides);
}

absl::StatusOr<ConfigReport> ReadConfig(absl::string_view text,
                                        absl::string_view file_name,
                                        int world_size,
                                        const AutoValues& values,
                                        bool ignore_unknown,
                                        const ConfigOverrides& overrides) {
  return ReportOf({text, file_name, ignore_unknown, overrides}, world_size,
                  values);
}

absl::StatusOr<std::string> ReadConfigFile(const std::string& path) {
  if (path.empty()) {
    return absl::InvalidArgumentError("the configuration's path is empty");
  }
  return ReadWholeFile(path, kMaxFileBytes);
}

absl::StatusOr<proto::Config> LoadConfig(const std::string& path,
                                         int world_size,
                                         const AutoValues& values,
                                         bool ignore_unknown,
                                         const ConfigOverrides& overrides) {
  TESSERA_ASSIGN_OR_RETURN(const std::string text, ReadConfigFile(path));
  return ParseConfig(text, path, world_size, values, overrides, ignore_unknown,
                     ConfigNotes::kLogged);
}

absl::StatusOr<proto::Config> ParseConfig(
    absl::string_view text, absl::string_view file_name, int world_size,
    const AutoValues& values, const ConfigOverrides& overrides,
    bool ignore_unknown, ConfigNotes notes) {
  const absl::StatusOr<ConfigReport> report = ReadConfig(
      text, file_name, world_size, values, ignore_unknown, overrides);
  if (!report.ok()) return OfFile(report.status(), file_name);
  if (report->faults.empty() && notes == ConfigNotes::kLogged) {
    LogNotes(report->notes, file_name);
  }
  absl::StatusOr<proto::Config> config = ConfigOf(*report, file_name);
  if (!config.ok()) return OfFile(config.status(), file_name);
  return config;
}

absl::StatusOr<proto::Config> ConfigFromJson(absl::string_view json,
                                             int world_size,
                                             const ConfigOverrides& overrides) {
  return ParseConfig(json, "<code>", world_size, {}, overrides);
}

absl::StatusOr<proto::Config> ToConfig(const TrainingConfig& config,
                                       int world_size, const AutoValues& values,
                                       const ConfigOverrides& overrides) {
  const Source source = SourceOf(config, overrides);
  TESSERA_ASSIGN_OR_RETURN(const ConfigReport report,
                           ReportOf(source, world_size, values));
  return ConfigOf(report, source.file_name);
}

absl::StatusOr<proto::Communication> CommunicationOf(
    const TrainingConfig& config, const ConfigOverrides& overrides) {
  return ReadCommunication(SourceOf(config, overrides));
}

absl::StatusOr<proto::Config> ResolveConfig(const proto::Config& config,
                                            int world_size) {
  ConfigReport report;
  report.config = config;
  Resolve(world_size, AutoValues(), &report);
  return ConfigOf(report, "");
}

int TensorRanksOf(const proto::Config& config) {
  return RanksOf(config.tensor_parallel().autotp_size());
}

int SequenceRanksOf(const proto::Config& config) {
  return RanksOf(config.sequence_parallel_size());
}

int PipelineRanksOf(const proto::Config& config) {
  return RanksOf(config.pipeline().stages());
}

absl::Status CheckRunnable(const proto::Config& config) {
  std::vector<std::string> missing = MissingFeatures(config);
  for (std::string& each : MissingParallelism(config)) {
    missing.push_back(std::move(each));
  }
  const proto::Optimizer& optimizer = config.optimizer();
  if (config.has_optimizer() && !FindAlgorithm(optimizer.type()).has_value()) {
    missing.push_back(absl::StrCat("optimizer.type: ", optimizer.type(),
                                   ": there is ", JoinWords(AlgorithmNames())));
  }
  if (config.scheduler().has_type() && !IsSchedule(config.scheduler().type())) {
    const std::string& type = config.scheduler().type();
    missing.push_back(
        absl::StrCat("scheduler.type: ", type, ": ", InsteadOfSchedule(type)));
  }
  if (missing.empty()) return absl::OkStatus();
  return absl::UnimplementedError(absl::StrCat(
      "not available in this version: ", absl::StrJoin(missing, "; ")));
}

}  // namespace tessera
