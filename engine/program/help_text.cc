#include "engine/program/help_text.h"

#include <algorithm>

#include "absl/flags/reflection.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/command/help_layout.h"

namespace tessera {
namespace {

// Returns the path's folder, without slashes in front, which absl's Filename
// leaves out.
absl::string_view FolderOf(absl::string_view path) {
  path.remove_prefix(std::min(path.find_first_not_of('/'), path.size()));
  const size_t slash = path.rfind('/');
  return slash == path.npos ? absl::string_view() : path.substr(0, slash);
}

std::string Entry(const absl::CommandLineFlag& flag) {
  const std::string value = flag.DefaultValue();
  std::string name = absl::StrCat("--", flag.Name());
  std::string text = flag.Help();
  if (flag.IsOfType<bool>()) {
    if (value == "true") {
      name = absl::StrCat("--no", flag.Name());
      absl::StrAppend(&text, " On by default.");
    }
  } else if (!value.empty()) {
    absl::StrAppend(&text, " Default: ", value, ".");
  }
  return HelpRow(name, text);
}

std::string ConfigEntries(const StartOptions& options) {
  std::string out;
  if (options.reads_config && absl::FindCommandLineFlag("config") == nullptr) {
    std::string text = "Configuration, DeepSpeed-style JSON.";
    if (!options.config.empty()) {
      absl::StrAppend(&text, " Default: ", options.config,
                      ", in the current folder or beside the program.");
    } else if (options.training.has_value() || !options.config_json.empty()) {
      absl::StrAppend(&text, " Default: the program has one.");
    }
    out += HelpRow("--config=FILE", text);
  }
  return out + HelpRow("--set KEY=VALUE",
                       "Set a key of the configuration: "
                       "--set zero_optimization.stage=1. May be repeated.");
}

}  // namespace

std::vector<const absl::CommandLineFlag*> FlagsOf(absl::string_view file) {
  std::vector<const absl::CommandLineFlag*> flags;
  for (const auto& [name, flag] : absl::GetAllFlags()) {
    if (flag->IsRetired() || IsOfAbsl(*flag)) continue;
    if (file.empty() || FolderOf(flag->Filename()) == FolderOf(file)) {
      flags.push_back(flag);
    }
  }
  std::sort(flags.begin(), flags.end(),
            [](const auto* a, const auto* b) { return a->Name() < b->Name(); });
  return flags;
}

bool IsOfAbsl(const absl::CommandLineFlag& flag) {
  return absl::StrContains(flag.Filename(), "absl/flags/");
}

std::string HelpText(absl::string_view program, const StartOptions& options,
                     absl::string_view file) {
  std::string out;
  if (!options.about.empty()) {
    absl::StrAppend(&out, program, " ", options.about, ".\n\n");
  }
  absl::StrAppend(&out, "Usage: ", program, " [--world=N]",
                  options.reads_config ? " [--config=FILE]" : "",
                  " [--set KEY=VALUE]... [flags]\n");
  const std::vector<const absl::CommandLineFlag*> flags = FlagsOf(file);
  if (!flags.empty()) out += "\nFlags of this program:\n";
  for (const absl::CommandLineFlag* flag : flags) out += Entry(*flag);
  absl::StrAppend(&out, "\nConfiguration:\n", ConfigEntries(options));
  out += "\nRanks:\n";
  for (const InitFlag& flag : InitFlags()) {
    out += HelpRow(absl::StrCat("--", flag.name, "=", flag.value), flag.text);
  }
  absl::StrAppend(&out, "\nExample: two ranks, ZeRO stage 1\n  ", program,
                  " --world=2 --set zero_optimization.stage=1\n");
  return out;
}

}  // namespace tessera
