#include "examples/gpt/flags.h"

#include <functional>
#include <limits>
#include <map>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "base/status.h"

const char kTrainUsage[] = R"(Trains a byte-level GPT on a file, in shards.

  train --data FILE [--world=N] [options]

  --data FILE      the text; any file
  --world=N        start N ranks on this machine (or use torchrun)
  --config FILE    DeepSpeed-style JSON (examples/gpt/zero3.json)
  --stage N        0 to 3, instead of the config's
  --dtype X        fp32, bf16 or fp16, instead of the config's
  --steps N        steps to train (100)
  --seed N         of the initial values, the data's order, the sample (1)
  --save DIR       write the sharded state after these steps
  --after N        then train N more, and report each one's loss (0)
  --resume DIR     start from what --save wrote
  --sample N       at the end, let the model write N bytes (0)
  --prompt TEXT    ... after this text
  --temperature X  ... 0 takes the likeliest byte each time (0.8)
  --dim N, --layers N, --heads N, --seq N, --dropout X
                   sizes of the model (384, 6, 6, 128, 0)
  --json           end with one line of JSON on stdout, the rest on stderr
  --quiet          no progress
)";

namespace {

constexpr int64_t kMany = std::numeric_limits<int32_t>::max();

// Stores a flag's text; the error says what was expected.
using Setter = std::function<absl::Status(absl::string_view)>;

absl::Status Expected(absl::string_view what, absl::string_view text) {
  return absl::InvalidArgumentError(
      absl::StrCat("expected ", what, ", got '", text, "'"));
}

// `store` takes an int64_t; both bounds are allowed.
template <typename Store>
Setter WholeNumber(int64_t min, int64_t max, Store store) {
  return [=](absl::string_view text) -> absl::Status {
    int64_t value = 0;
    if (!absl::SimpleAtoi(text, &value) || value < min || value > max) {
      return Expected(max == kMany
                          ? absl::StrCat("a whole number from ", min)
                          : absl::StrCat("a whole number, ", min, " to ", max),
                      text);
    }
    store(value);
    return absl::OkStatus();
  };
}

// `store` takes a double.
template <typename Store>
Setter Number(double min, double max, Store store) {
  return [=](absl::string_view text) -> absl::Status {
    double value = 0;
    if (!absl::SimpleAtod(text, &value) || !(value >= min && value <= max)) {
      return Expected(absl::StrCat("a number, ", min, " to ", max), text);
    }
    store(value);
    return absl::OkStatus();
  };
}

Setter Text(std::string* out, bool may_be_empty = false) {
  return [=](absl::string_view text) -> absl::Status {
    if (text.empty() && !may_be_empty) return Expected("a name", text);
    *out = std::string(text);
    return absl::OkStatus();
  };
}

// Every flag that takes a value. `flags` must outlive the result.
std::map<std::string, Setter> ValueFlags(TrainFlags* flags) {
  auto whole = [](int64_t min, auto* out) {
    return WholeNumber(min, kMany, [out](int64_t v) { *out = v; });
  };
  GptOptions* model = &flags->model;
  SampleOptions* sample = &flags->sample;
  std::map<std::string, Setter> setters;
  setters["--config"] = Text(&flags->config);
  setters["--data"] = Text(&flags->data);
  setters["--save"] = Text(&flags->save);
  setters["--resume"] = Text(&flags->resume);
  setters["--prompt"] = Text(&flags->prompt, /*may_be_empty=*/true);
  setters["--stage"] =
      WholeNumber(0, 3, [flags](int64_t v) { flags->stage = v; });
  setters["--dtype"] = [flags](absl::string_view text) -> absl::Status {
    if (text != "fp32" && text != "bf16" && text != "fp16") {
      return Expected("fp32, bf16 or fp16", text);
    }
    flags->dtype = std::string(text);
    return absl::OkStatus();
  };
  setters["--steps"] = whole(0, &flags->steps);
  setters["--after"] = whole(0, &flags->after);
  setters["--seed"] = whole(0, &flags->seed);
  setters["--sample"] = whole(0, &sample->bytes);
  setters["--temperature"] =
      Number(0, 100, [sample](double v) { sample->temperature = v; });
  setters["--dim"] =
      WholeNumber(1, kMany, [model](int64_t v) { model->dim(v); });
  setters["--layers"] =
      WholeNumber(1, kMany, [model](int64_t v) { model->layers(v); });
  setters["--heads"] =
      WholeNumber(1, kMany, [model](int64_t v) { model->heads(v); });
  setters["--seq"] =
      WholeNumber(1, kMany, [model](int64_t v) { model->seq(v); });
  setters["--dropout"] =
      Number(0, 0.99, [model](double v) { model->dropout(v); });
  return setters;
}

std::map<std::string, bool*> SwitchFlags(TrainFlags* flags) {
  return {{"--json", &flags->json},
          {"--quiet", &flags->quiet},
          {"--help", &flags->help},
          {"-h", &flags->help}};
}

absl::Status CheckTogether(const TrainFlags& flags) {
  if (flags.help) return absl::OkStatus();
  if (flags.data.empty() && flags.steps + flags.after > 0) {
    return absl::InvalidArgumentError("--data FILE is missing; see --help");
  }
  if (flags.model.dim() % flags.model.heads() != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("--dim ", flags.model.dim(),
                     " is not a multiple of --heads ", flags.model.heads()));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<TrainFlags> ParseTrainFlags(int argc, char** argv) {
  TrainFlags flags;
  const auto setters = ValueFlags(&flags);
  const auto switches = SwitchFlags(&flags);
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    const size_t equals = argument.find('=');
    const std::string name = argument.substr(0, equals);
    if (auto it = switches.find(argument); it != switches.end()) {
      *it->second = true;
      continue;
    }
    auto setter = setters.find(name);
    if (setter == setters.end()) {
      return absl::InvalidArgumentError(
          absl::StrCat("unknown flag '", argument, "'; see --help"));
    }
    if (equals == std::string::npos && ++i >= argc) {
      return absl::InvalidArgumentError(absl::StrCat(name, ": no value"));
    }
    const std::string value = equals == std::string::npos
                                  ? std::string(argv[i])
                                  : argument.substr(equals + 1);
    TESSERA_RETURN_IF_ERROR(tessera::Annotate(setter->second(value), name));
  }
  TESSERA_RETURN_IF_ERROR(CheckTogether(flags));
  flags.sample.seed = flags.seed;
  return flags;
}
