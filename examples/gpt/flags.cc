#include "examples/gpt/flags.h"

#include <limits>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "base/status.h"

ABSL_FLAG(std::string, data, "", "Text to train on: any file.");
ABSL_FLAG(int64_t, held_out, TrainFlags().held_out,
          "Samples at the end of the text that are not trained on; their loss "
          "after --steps is reported.");
ABSL_FLAG(bool, ignore_unknown, false,
          "Ignore unknown keys of --config, with a warning each.");
ABSL_FLAG(int64_t, stage, -1, "ZeRO stage, 0 to 3; -1: the config's.");
ABSL_FLAG(std::string, dtype, "",
          "fp32, bf16 or fp16; by default the config's.");
ABSL_FLAG(int64_t, steps, TrainFlags().steps, "Steps to train.");
ABSL_FLAG(uint64_t, seed, TrainFlags().seed,
          "Seed of initial values, data order and sample.");
ABSL_FLAG(std::string, save, "", "Folder for the sharded state after --steps.");
ABSL_FLAG(int64_t, after, TrainFlags().after,
          "Steps to train after --save; the loss of each is reported.");
ABSL_FLAG(std::string, resume, "", "Folder that --save wrote, to start from.");
ABSL_FLAG(int64_t, sample, TrainFlags().sample.count,
          "Number of bytes to generate at the end.");
ABSL_FLAG(std::string, prompt, TrainFlags().prompt,
          "Text that --sample continues.");
ABSL_FLAG(double, temperature, TrainFlags().sample.temperature,
          "Temperature of --sample; 0 takes the most likely byte each time.");
ABSL_FLAG(int64_t, dim, GptOptions().dim(), "Width of the model.");
ABSL_FLAG(int64_t, layers, GptOptions().layers(),
          "Number of transformer blocks.");
ABSL_FLAG(int64_t, heads, GptOptions().heads(), "Number of attention heads.");
ABSL_FLAG(int64_t, seq, GptOptions().seq(), "Bytes of context.");
ABSL_FLAG(double, dropout, GptOptions().dropout(), "Dropout probability.");
ABSL_FLAG(bool, chunked_loss, TrainFlags().chunked_loss,
          "Compute the loss with tessera::LinearCrossEntropy, which holds the "
          "logits of a few tokens at a time: less memory for a large "
          "vocabulary, different bits.");
ABSL_FLAG(
    bool, json, false,
    "End with one line of JSON on stdout; everything else goes to stderr.");
ABSL_FLAG(bool, quiet, false, "Print no progress.");

namespace {

constexpr int64_t kMany = std::numeric_limits<int32_t>::max();

template <typename Got>
absl::Status Expected(absl::string_view flag, absl::string_view what,
                      const Got& got) {
  return absl::InvalidArgumentError(
      absl::StrCat("--", flag, ": expected ", what, ", got ", got));
}

absl::Status CheckSizes(const TrainFlags& flags) {
  const struct {
    const char* name;
    int64_t value, least;
  } kSizes[] = {
      {"steps", flags.steps, 0},           {"after", flags.after, 0},
      {"sample", flags.sample.count, 0},   {"dim", flags.model.dim(), 1},
      {"layers", flags.model.layers(), 1}, {"heads", flags.model.heads(), 1},
      {"seq", flags.model.seq(), 1},       {"held_out", flags.held_out, 0},
  };
  for (const auto& size : kSizes) {
    if (size.value >= size.least && size.value <= kMany) continue;
    return Expected(size.name,
                    absl::StrCat("a whole number, ", size.least, " to ", kMany),
                    size.value);
  }
  if (flags.model.dim() % flags.model.heads() != 0) {
    return Expected("dim",
                    absl::StrCat("a multiple of --heads ", flags.model.heads()),
                    flags.model.dim());
  }
  return absl::OkStatus();
}

absl::Status Check(const TrainFlags& flags) {
  TESSERA_RETURN_IF_ERROR(CheckSizes(flags));
  if (flags.stage < -1 || flags.stage > 3) {
    return Expected("stage", "0 to 3, or -1 for the config's", flags.stage);
  }
  const std::string& dtype = flags.dtype;
  if (!dtype.empty() && dtype != "fp32" && dtype != "bf16" && dtype != "fp16") {
    return Expected("dtype", "fp32, bf16 or fp16", dtype);
  }
  const double temperature = flags.sample.temperature;
  if (!(temperature >= 0 &&
        temperature <= 100)) {  // written so that NaN is refused
    return Expected("temperature", "0 to 100", temperature);
  }
  const double dropout = flags.model.dropout();
  if (!(dropout >= 0 && dropout <= 0.99)) {
    return Expected("dropout", "0 to 0.99", dropout);
  }
  if (flags.data.empty() && flags.steps + flags.after + flags.held_out > 0) {
    return absl::InvalidArgumentError("--data FILE is missing; see --help");
  }
  return absl::OkStatus();
}

}  // namespace

std::vector<std::string> ConfigKeys(const TrainFlags& flags) {
  std::vector<std::string> keys;
  if (flags.stage >= 0) {
    keys.push_back(absl::StrCat("zero_optimization.stage=", flags.stage));
  }
  if (!flags.dtype.empty()) {
    for (const char* const dtype : {"bf16", "fp16"}) {
      keys.push_back(absl::StrCat(
          dtype, ".enabled=", flags.dtype == dtype ? "true" : "false"));
    }
  }
  return keys;
}

absl::StatusOr<TrainFlags> ReadTrainFlags() {
  TrainFlags flags;
  flags.ignore_unknown = absl::GetFlag(FLAGS_ignore_unknown);
  flags.stage = absl::GetFlag(FLAGS_stage);
  flags.dtype = absl::GetFlag(FLAGS_dtype);
  flags.steps = absl::GetFlag(FLAGS_steps);
  flags.after = absl::GetFlag(FLAGS_after);
  flags.data = absl::GetFlag(FLAGS_data);
  flags.held_out = absl::GetFlag(FLAGS_held_out);
  flags.seed = absl::GetFlag(FLAGS_seed);
  flags.save = absl::GetFlag(FLAGS_save);
  flags.resume = absl::GetFlag(FLAGS_resume);
  flags.prompt = absl::GetFlag(FLAGS_prompt);
  flags.sample.count = absl::GetFlag(FLAGS_sample);
  flags.sample.temperature = absl::GetFlag(FLAGS_temperature);
  flags.sample.seed = flags.seed;
  flags.sample.context = absl::GetFlag(FLAGS_seq);
  flags.model.dim(absl::GetFlag(FLAGS_dim))
      .layers(absl::GetFlag(FLAGS_layers))
      .heads(absl::GetFlag(FLAGS_heads))
      .seq(absl::GetFlag(FLAGS_seq))
      .dropout(absl::GetFlag(FLAGS_dropout));
  flags.chunked_loss = absl::GetFlag(FLAGS_chunked_loss);
  flags.json = absl::GetFlag(FLAGS_json);
  flags.quiet = absl::GetFlag(FLAGS_quiet);
  TESSERA_RETURN_IF_ERROR(Check(flags));
  return flags;
}
