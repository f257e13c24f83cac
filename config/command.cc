#include "config/command.h"

#include <map>
#include <optional>

#include "absl/status/statusor.h"
#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "base/check.h"
#include "base/edit_distance.h"
#include "base/json.h"
#include "config/config.h"
#include "config/config_report.h"
#include "config/config_text.h"
#include "config/describe.h"
#include "config/reader/json_reader.h"

namespace tessera {
namespace {

constexpr int64_t kMostRanks = 1000000;

// What the flags of a subcommand say of how a file is read.
struct Reading {
  int64_t world_size = 1;
  AutoValues autos;
  bool ignore_unknown = false;
};

const std::vector<CommandFlag>& ReadingFlags() {
  static const auto& flags = *new std::vector<CommandFlag>{
      {"--world", "N",
       "Number of ranks (1), which determines batch sizes and groups."},
      {"--auto", "KEY=VALUE,...",
       "Values of keys that are \"auto\", which a program would give, such as "
       "hidden_size=4096."},
      {"--ignore_unknown", "",
       "Reports unknown keys as notes instead of faults."}};
  return flags;
}

using Values = std::map<std::string, std::string>;

// Collects the leaves of a JSON value by their paths.
void Flatten(const JsonValue& value, const std::string& path, Values* values) {
  if (value.kind != JsonKind::kObject || value.members.empty()) {
    (*values)[path] = ToJsonText(value);
    return;
  }
  for (const JsonMember& member : value.members) {
    Flatten(member.value,
            path.empty() ? member.key : absl::StrCat(path, ".", member.key),
            values);
  }
}

Values ValuesOf(const proto::Config& config) {
  const absl::StatusOr<JsonValue> root = ReadJson(ConfigToJson(config), "");
  TESSERA_CHECK_OK(root);
  Values values;
  Flatten(*root, "", &values);
  return values;
}

// Returns "path: value" of what the file says, and of batches that follow from
// it; counts the others. `text`: ConfigToText's.
std::vector<std::string> SaidLines(const std::string& text, int* others) {
  std::vector<std::string> said, sections;
  for (absl::string_view line : absl::StrSplit(text, '\n')) {
    line = absl::StripLeadingAsciiWhitespace(line);
    if (absl::ConsumeSuffix(&line, " {")) {
      sections.emplace_back(line);
    } else if (line == "}") {
      sections.pop_back();
    } else if (absl::StrContains(line, "  # default") ||
               (absl::StrContains(line, "  # resolved") && !sections.empty())) {
      ++*others;
    } else if (!line.empty()) {
      said.push_back(absl::StrCat(absl::StrJoin(sections, "."),
                                  sections.empty() ? "" : ".", line));
    }
  }
  return said;
}

// Returns "32 = 16 x 1 x 2": a step's samples, of a rank's batch, accumulated,
// by ranks.
std::string BatchText(const proto::Config& config, int64_t world_size) {
  return absl::StrCat(config.train_batch_size(), " = ",
                      config.train_micro_batch_size_per_gpu(), " x ",
                      config.gradient_accumulation_steps(), " x ", world_size);
}

// Returns ", saves every 500 steps or 10 min to run7", as a CheckpointManager
// does; "" if the section says nothing of it.
std::string CadenceText(const proto::Checkpoint& section) {
  std::vector<std::string> when;
  if (section.every_steps() > 0) {
    when.push_back(absl::StrCat(section.every_steps(), " steps"));
  }
  if (section.every_minutes() > 0) {
    when.push_back(absl::StrCat(section.every_minutes(), " min"));
  }
  std::string text;
  if (!when.empty()) {
    absl::StrAppend(&text, ", saves every ", absl::StrJoin(when, " or "));
  }
  if (!section.folder().empty()) {
    absl::StrAppend(&text, text.empty() ? ", saves" : "", " to ",
                    section.folder());
  }
  return text;
}

// Returns what a reader asks first, in one line.
std::string SummaryText(const proto::Config& config, const Values& values,
                        int64_t world_size) {
  const auto value = [&](const char* path) {
    const auto found = values.find(path);
    return found == values.end() ? std::string("none") : found->second;
  };
  const bool bf16 = config.bf16().enabled(), fp16 = config.fp16().enabled();
  std::string text =
      absl::StrCat(world_size, world_size == 1 ? " rank" : " ranks", ", batch ",
                   BatchText(config, world_size), ", stage ",
                   value("zero_optimization.stage"), ", ",
                   bf16   ? "bf16"
                   : fp16 ? "fp16"
                          : "fp32");
  const std::string type = value("optimizer.type");
  if (type != "none") {
    absl::StrAppend(&text, ", ",
                    absl::StripPrefix(absl::StripSuffix(type, "\""), "\""),
                    " lr ", value("optimizer.params.lr"));
  }
  if (config.gradient_clipping() > 0) {
    absl::StrAppend(&text, ", clip ", value("gradient_clipping"));
  }
  absl::StrAppend(&text, CadenceText(config.checkpoint()));
  return text;
}

std::string FaultsJson(const std::vector<ConfigFault>& faults) {
  return absl::StrCat(
      "[",
      absl::StrJoin(faults, ", ",
                    [](std::string* out, const ConfigFault& fault) {
                      absl::StrAppend(out, "{\"path\": ", QuoteJson(fault.path),
                                      ", \"what\": ", QuoteJson(fault.what));
                      if (fault.position.has_value()) {
                        absl::StrAppend(
                            out, ", \"line\": ", fault.position->line,
                            ", \"column\": ", fault.position->column);
                      }
                      absl::StrAppend(out, "}");
                    }),
      "]");
}

class ConfigCommand {
 public:
  explicit ConfigCommand(CommandCall* call)
      : call_(*call), out_(call->out()), err_(call->err()) {}

  int Check() {
    if (!ReadFlags()) return 2;
    const std::string& path = call_.words()[0];
    const std::optional<ConfigReport> report = Read(path);
    if (!report.has_value()) return 1;
    TellNotes(*report, path);
    if (call_.Has("--json")) {
      out_ << ConfigToJson(report->config);
    } else if (call_.Has("--all")) {
      out_ << "# on " << reading_.world_size
           << (reading_.world_size == 1 ? " rank (--world N)\n" : " ranks\n")
           << ConfigToText(report->config, report->written);
    } else {
      TellShortly(*report, path);
    }
    return 0;
  }

  int Diff() {
    if (!ReadFlags()) return 2;
    const auto a = Read(call_.words()[0]), b = Read(call_.words()[1]);
    if (!a.has_value() || !b.has_value()) return 2;
    const Values values[] = {ValuesOf(a->config), ValuesOf(b->config)};
    Values all = values[0];
    all.insert(values[1].begin(), values[1].end());
    const bool json = call_.Has("--json");
    std::vector<std::string> lines;
    for (const auto& entry : all) {
      const std::string& path = entry.first;
      const auto in = [&](const Values& side) {
        const auto found = side.find(path);
        return found == side.end() ? std::string(json ? "null" : "absent")
                                   : found->second;
      };
      const std::string left = in(values[0]), right = in(values[1]);
      if (left == right) continue;
      lines.push_back(
          json ? absl::StrCat(QuoteJson(path), ": [", left, ", ", right, "]")
               : absl::StrCat(path, ": ", left, " | ", right));
    }
    if (json) {
      out_ << "{" << absl::StrJoin(lines, ",\n ") << "}\n";
    } else if (!lines.empty()) {
      out_ << absl::StrJoin(lines, "\n") << "\n";
    }
    return lines.empty() ? 0 : 1;
  }

  int ExplainKey() {
    const std::string& key = call_.words()[0];
    const std::vector<KeyDescription> found = FindKeys(key);
    for (const KeyDescription& each : found) out_ << Explain(each);
    if (!found.empty()) return 0;
    std::vector<std::string> names;
    for (const KeyDescription& each : DescribeKeys()) {
      names.push_back(each.path);
      names.push_back(each.path.substr(each.path.rfind('.') + 1));
    }
    const std::string nearest = NearestName(key, names);
    return call_.Failed(absl::NotFoundError(absl::StrCat(
        "no key '", key, "'",
        nearest.empty() ? "; docs/config.md lists all"
                        : absl::StrCat(", did you mean '", nearest, "'?"))));
  }

 private:
  // Returns false after telling what is wrong.
  bool ReadFlags() {
    if (!call_.ReadNumber("--world", 1, &reading_.world_size, kMostRanks))
      return false;
    reading_.ignore_unknown = call_.Has("--ignore_unknown");
    if (!call_.Has("--auto")) return true;
    absl::StatusOr<AutoValues> autos = AutoValues::Parse(call_.Get("--auto"));
    if (!autos.ok()) {
      call_.Misused(autos.status().message());
      return false;
    }
    reading_.autos = *std::move(autos);
    return true;
  }

  // Returns nullopt after telling the faults.
  std::optional<ConfigReport> Read(const std::string& path) {
    const absl::StatusOr<std::string> text = ReadConfigFile(path);
    if (!text.ok()) {
      err_ << text.status().message() << "\n";
      return std::nullopt;
    }
    absl::StatusOr<ConfigReport> report =
        ReadConfig(*text, path, static_cast<int>(reading_.world_size),
                   reading_.autos, reading_.ignore_unknown);
    if (!report.ok()) {
      err_ << report.status().message() << "\n";
      return std::nullopt;
    }
    if (report->faults.empty()) return *std::move(report);
    if (call_.Has("--json")) {
      out_ << "{\"faults\": " << FaultsJson(report->faults) << "}\n";
      return std::nullopt;
    }
    for (const ConfigFault& fault : report->faults) {
      err_ << FormatFault(fault, path) << "\n";
    }
    return std::nullopt;
  }

  void TellNotes(const ConfigReport& report, const std::string& path) {
    for (const ConfigFault& note : report.notes) {
      err_ << "note: " << FormatFault(note, path) << "\n";
    }
    const absl::Status runnable = CheckRunnable(report.config);
    if (!runnable.ok()) {
      err_ << "note: Engine::Create refuses this: " << runnable.message()
           << "\n";
    }
  }

  void TellShortly(const ConfigReport& report, const std::string& path) {
    out_ << path << ": OK, "
         << SummaryText(report.config, ValuesOf(report.config),
                        reading_.world_size)
         << "\n";
    int others = 0;
    for (const std::string& line :
         SaidLines(ConfigToText(report.config, report.written), &others)) {
      out_ << "  " << line << "\n";
    }
    out_ << "  (" << others << " other values are not in the file: --all)\n";
  }

  CommandCall& call_;
  std::ostream& out_;
  std::ostream& err_;
  Reading reading_;
};

template <int (ConfigCommand::*kRun)()>
int Run(CommandCall* call) {
  return (ConfigCommand(call).*kRun)();
}

template <std::string (*kText)()>
int Print(CommandCall* call) {
  call->out() << kText();
  return 0;
}

std::vector<CommandFlag> With(std::vector<CommandFlag> flags,
                              const std::vector<CommandFlag>& more) {
  flags.insert(flags.begin(), more.begin(), more.end());
  return flags;
}

}  // namespace

std::vector<Command> ConfigCommands() {
  return {
      {"config check",
       "FILE",
       "Checks a configuration: prints a summary, or all its faults.",
       "Faults have their line and column. Notes of keys that have no effect "
       "go to standard error.",
       With({{"--all", "", "Prints every value, with all defaults."},
             {"--json", "",
              "Prints JSON: the completed configuration, or {faults}, each of "
              "which has path, what, line and column."}},
            ReadingFlags()),
       {"config check zero3.json --world 8",
        "config check ds_config.json --auto hidden_size=4096 --json"},
       Run<&ConfigCommand::Check>},
      {"config diff",
       "A B",
       "Prints the keys in which two completed configurations differ, one per "
       "line.",
       "",
       With(
           {{"--json", "", "Prints JSON: [A's value, B's value] of each key."}},
           ReadingFlags()),
       {"config diff zero2.json zero3.json --world 8"},
       Run<&ConfigCommand::Diff>},
      {"config explain",
       "KEY",
       "Explains what a key means, its default, and how it is supported.",
       "",
       {},
       {"config explain zero_optimization.stage",
        "config explain max_live_parameters"},
       Run<&ConfigCommand::ExplainKey>},
      {"config schema",
       "",
       "Prints a JSON schema, which editors use to check a file while you "
       "write it.",
       "",
       {},
       {"config schema > schema.json"},
       Print<JsonSchema>},
      {"config tables",
       "",
       "Prints the tables of docs/config.md.",
       "",
       {},
       {"config tables > tables.md"},
       Print<KeyTables>},
  };
}

}  // namespace tessera
