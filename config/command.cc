#include "config/command.h"

#include <map>
#include <optional>

#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "base/check.h"
#include "base/status.h"
#include "config/config.h"
#include "config/config_report.h"
#include "config/config_text.h"
#include "config/describe.h"
#include "config/reader/json_reader.h"

namespace tessera {
namespace {

constexpr char kUsage[] =
    "tessera config check FILE [--world N] [--auto KEY=VALUE,...] [--json]\n"
    "                     [--ignore_unknown]\n"
    "    prints the completed configuration, or its faults\n"
    "tessera config diff A B [--world N] [--auto KEY=VALUE,...]\n"
    "                     [--ignore_unknown]\n"
    "    prints in what two completed configurations differ\n"
    "tessera config explain KEY\n"
    "    tells what a key means, its default, and what becomes of it\n"
    "tessera config schema\n"
    "    prints a JSON schema for editors\n"
    "tessera config tables\n"
    "    prints the tables of docs/config.md\n";

struct Flags {
  std::vector<std::string> positional;
  int world_size = 1;
  AutoValues autos;
  bool json = false;
  bool ignore_unknown = false;
};

absl::Status SetFlag(absl::string_view name, const std::string& value,
                     Flags* flags) {
  if (name == "--auto") {
    TESSERA_ASSIGN_OR_RETURN(flags->autos, AutoValues::Parse(value));
    return absl::OkStatus();
  }
  if (absl::SimpleAtoi(value, &flags->world_size) && flags->world_size > 0) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      absl::StrCat("--world: expected at least 1, got '", value, "'"));
}

// Flags are parsed by hand: absl's flags end the process with 1 at a fault,
// which for `diff` means that two configurations differ.
absl::StatusOr<Flags> ParseFlags(const std::vector<std::string>& args) {
  Flags flags;
  for (size_t i = 1; i < args.size(); ++i) {
    if (!absl::StartsWith(args[i], "--")) {
      flags.positional.push_back(args[i]);
      continue;
    }
    const std::vector<std::string> parts =
        absl::StrSplit(args[i], absl::MaxSplits('=', 1));
    const std::string& name = parts[0];
    if (parts.size() == 1 && (name == "--json" || name == "--ignore_unknown")) {
      (name == "--json" ? flags.json : flags.ignore_unknown) = true;
      continue;
    }
    if (name != "--world" && name != "--auto") {
      return absl::InvalidArgumentError(absl::StrCat("unknown flag ", args[i]));
    }
    if (parts.size() == 1 && i + 1 == args.size()) {
      return absl::InvalidArgumentError(absl::StrCat(name, " needs a value"));
    }
    TESSERA_RETURN_IF_ERROR(
        SetFlag(name, parts.size() == 2 ? parts[1] : args[++i], &flags));
  }
  return flags;
}

class Command {
 public:
  Command(std::ostream* out, std::ostream* err) : out_(*out), err_(*err) {}

  int Run(const std::vector<std::string>& args) {
    const std::string name = args.empty() ? "" : args[0];
    const absl::StatusOr<Flags> flags = ParseFlags(args);
    if (!flags.ok()) return Misused(flags.status().message());
    const std::map<std::string, size_t> arity = {{"check", 1},
                                                 {"diff", 2},
                                                 {"explain", 1},
                                                 {"schema", 0},
                                                 {"tables", 0}};
    const auto found = arity.find(name);
    if (found == arity.end() || found->second != flags->positional.size()) {
      return Misused("");
    }
    if (name == "check") return Check(*flags);
    if (name == "diff") return Diff(*flags);
    if (name == "explain") return ExplainKey(flags->positional[0]);
    out_ << (name == "schema" ? JsonSchema() : KeyTables());
    return 0;
  }

 private:
  int Misused(absl::string_view why) {
    if (!why.empty()) err_ << why << "\n";
    err_ << kUsage;
    return 2;
  }

  // Returns nullopt after printing the configuration's faults.
  std::optional<ConfigReport> Read(const std::string& path,
                                   const Flags& flags) {
    const absl::StatusOr<std::string> text = ReadConfigFile(path);
    if (!text.ok()) {
      err_ << text.status().message() << "\n";
      return std::nullopt;
    }
    absl::StatusOr<ConfigReport> report = ReadConfig(
        *text, path, flags.world_size, flags.autos, flags.ignore_unknown);
    if (!report.ok()) {
      err_ << report.status().message() << "\n";
      return std::nullopt;
    }
    for (const ConfigFault& fault : report->faults) {
      err_ << FormatFault(fault, path) << "\n";
    }
    if (!report->faults.empty()) return std::nullopt;
    return *std::move(report);
  }

  int Check(const Flags& flags) {
    const std::string& path = flags.positional[0];
    const std::optional<ConfigReport> report = Read(path, flags);
    if (!report.has_value()) return 1;
    for (const ConfigFault& note : report->notes) {
      err_ << "note: " << FormatFault(note, path) << "\n";
    }
    const absl::Status runnable = CheckRunnable(report->config);
    if (!runnable.ok()) {
      err_ << "note: Engine::Create refuses this: " << runnable.message()
           << "\n";
    }
    if (flags.json) {
      out_ << ConfigToJson(report->config);
      return 0;
    }
    out_ << "# on " << flags.world_size
         << (flags.world_size == 1 ? " rank (--world N)\n" : " ranks\n")
         << ConfigToText(report->config, report->written);
    return 0;
  }

  int Diff(const Flags& flags) {
    const auto a = Read(flags.positional[0], flags);
    const auto b = Read(flags.positional[1], flags);
    if (!a.has_value() || !b.has_value()) return 1;
    std::map<std::string, std::string> values[2];
    Flatten(ConfigToJson(a->config), &values[0]);
    Flatten(ConfigToJson(b->config), &values[1]);
    std::map<std::string, std::string> all = values[0];
    all.insert(values[1].begin(), values[1].end());
    bool differ = false;
    for (const auto& entry : all) {
      const std::string& path = entry.first;
      const auto in = [&](const std::map<std::string, std::string>& side) {
        const auto found = side.find(path);
        return found == side.end() ? "absent" : found->second;
      };
      const std::string left = in(values[0]), right = in(values[1]);
      if (left == right) continue;
      differ = true;
      out_ << path << ": " << left << " | " << right << "\n";
    }
    return differ ? 1 : 0;
  }

  // Collects the leaves of a JSON text by their paths.
  static void Flatten(const std::string& text,
                      std::map<std::string, std::string>* values) {
    const absl::StatusOr<JsonValue> root = ReadJson(text, "");
    TESSERA_CHECK_OK(root);
    Flatten(*root, "", values);
  }
  static void Flatten(const JsonValue& value, const std::string& path,
                      std::map<std::string, std::string>* values) {
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

  int ExplainKey(const std::string& key) {
    const std::vector<KeyDescription> found = FindKeys(key);
    for (const KeyDescription& each : found) out_ << Explain(each);
    if (!found.empty()) return 0;
    err_ << "no key '" << key << "'; docs/config.md lists all\n";
    return 1;
  }

  std::ostream& out_;
  std::ostream& err_;
};

}  // namespace

int RunConfigCommand(const std::vector<std::string>& args, std::ostream* out,
                     std::ostream* err) {
  return Command(out, err).Run(args);
}

}  // namespace tessera
