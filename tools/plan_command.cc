#include "tools/plan_command.h"

#include <stdlib.h>
#include <sys/sysinfo.h>

#include <filesystem>
#include <map>
#include <memory>
#include <system_error>
#include <utility>

#include "ATen/ops/randint.h"
#include "absl/status/statusor.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "base/status.h"
#include "comm/group/self_communicator.h"
#include "config/config.h"
#include "engine/build/settings.h"
#include "engine/plan/auto_choice.h"
#include "engine/plan/plan.h"
#include "engine/plan/rates.h"
#include "examples/gpt/gpt.h"
#include "examples/llama/llama.h"
#include "examples/llama/llama_config.h"

namespace tessera {
namespace {

constexpr int64_t kMostRanks = 1000000;

struct Flags {
  std::string config, model;
  int64_t world_size = 1;
  double memory_gib = 0;
  double network = 0, latency = 10, tflops = 0, bandwidth = 0, disk = 0;
  bool one_host = false, json = false;
};

// Returns false after telling what is wrong.
bool ReadFlags(CommandCall* call, Flags* flags) {
  flags->config = call->Get("--config");
  flags->model = call->Get("--model");
  flags->one_host = call->Has("--one_host");
  flags->json = call->Has("--json");
  const std::pair<const char*, double*> numbers[] = {
      {"--memory", &flags->memory_gib},   {"--network", &flags->network},
      {"--latency", &flags->latency},     {"--tflops", &flags->tflops},
      {"--bandwidth", &flags->bandwidth}, {"--disk", &flags->disk}};
  for (const auto& [name, number] : numbers) {
    if (!call->ReadPositive(name, number)) return false;
  }
  if (!call->ReadNumber("--world", 1, &flags->world_size, kMostRanks))
    return false;
  if (!flags->config.empty() && !flags->model.empty()) return true;
  call->Misused("--config and --model are needed");
  return false;
}

using Numbers = std::map<std::string, int64_t>;

// Reads "dim=4096,layers=32" over the defaults in `numbers`.
absl::Status ReadNumbers(absl::string_view text, Numbers* numbers) {
  for (const absl::string_view part :
       absl::StrSplit(text, ',', absl::SkipEmpty())) {
    const std::pair<std::string, std::string> pair =
        absl::StrSplit(part, absl::MaxSplits('=', 1));
    const auto found = numbers->find(pair.first);
    if (found == numbers->end()) {
      return absl::InvalidArgumentError(
          absl::StrCat("--model: unknown '", pair.first, "'; there are ",
                       absl::StrJoin(*numbers, ", ",
                                     [](std::string* out, const auto& known) {
                                       absl::StrAppend(out, known.first);
                                     })));
    }
    if (!absl::SimpleAtoi(pair.second, &found->second) || found->second < 1) {
      return absl::InvalidArgumentError(
          absl::StrCat("--model: expected ", pair.first,
                       " of at least 1, got '", pair.second, "'"));
    }
  }
  return absl::OkStatus();
}

constexpr int64_t kLlamaSeq = 128;  // tokens of a sample

struct Model {
  std::shared_ptr<torch::nn::Module> module;
  SampledLoss loss;
};

// Makes a model with loss(tokens, targets), on a batch of tokens.
template <typename Impl, typename Options>
absl::StatusOr<Model> Make(const Options& options, int64_t seq, int64_t vocab) {
  TESSERA_ASSIGN_OR_RETURN(
      const std::shared_ptr<Impl> module,
      ConstructFake([&] { return std::make_shared<Impl>(options); }));
  return Model{
      module, [=](int64_t batch) {
        const at::Tensor tokens = at::randint(vocab, {batch, seq}, at::kLong);
        return module->loss(tokens, tokens);
      }};
}

absl::StatusOr<Model> MakeGpt(absl::string_view text) {
  const GptOptions defaults;
  Numbers n{{"dim", defaults.dim()},
            {"layers", defaults.layers()},
            {"heads", defaults.heads()},
            {"seq", defaults.seq()},
            {"vocab", defaults.vocab()}};
  TESSERA_RETURN_IF_ERROR(ReadNumbers(text, &n));
  return Make<GptImpl>(GptOptions()
                           .dim(n["dim"])
                           .layers(n["layers"])
                           .heads(n["heads"])
                           .seq(n["seq"])
                           .vocab(n["vocab"]),
                       n["seq"], n["vocab"]);
}

absl::StatusOr<Model> MakeLlama(absl::string_view text) {
  const LlamaOptions defaults;
  Numbers n{{"dim", defaults.dim()},       {"layers", defaults.layers()},
            {"heads", defaults.heads()},   {"kv_heads", defaults.kv_heads()},
            {"hidden", defaults.hidden()}, {"seq", kLlamaSeq},
            {"vocab", defaults.vocab()}};
  TESSERA_RETURN_IF_ERROR(ReadNumbers(text, &n));
  return Make<LlamaImpl>(LlamaOptions()
                             .dim(n["dim"])
                             .layers(n["layers"])
                             .heads(n["heads"])
                             .kv_heads(n["kv_heads"])
                             .hidden(n["hidden"])
                             .vocab(n["vocab"]),
                         n["seq"], n["vocab"]);
}

// Makes the model of a Hugging Face config.json; `text`: its path, and ":seq=N"
// behind it.
absl::StatusOr<Model> MakeHuggingFace(absl::string_view path,
                                      absl::string_view text) {
  Numbers n{{"seq", kLlamaSeq}};
  TESSERA_RETURN_IF_ERROR(ReadNumbers(text, &n));
  TESSERA_ASSIGN_OR_RETURN(const LlamaOptions options,
                           ReadLlamaConfig(std::string(path)));
  return Make<LlamaImpl>(options, n["seq"], options.vocab());
}

absl::StatusOr<Model> MakeModel(const std::string& text) {
  const std::pair<std::string, std::string> parts =
      absl::StrSplit(text, absl::MaxSplits(':', 1));
  if (parts.first == "gpt") return MakeGpt(parts.second);
  if (parts.first == "llama") return MakeLlama(parts.second);
  std::error_code error;
  if (std::filesystem::exists(parts.first, error)) {
    return MakeHuggingFace(parts.first, parts.second);
  }
  return absl::InvalidArgumentError(
      absl::StrCat("--model: expected gpt:..., llama:... or the config.json of "
                   "a Llama, got '",
                   text, "'"));
}

absl::StatusOr<Rates> RatesOf(const Flags& flags, const proto::Config& config) {
  const std::shared_ptr<Communicator> self = MakeSelfCommunicator();
  TESSERA_ASSIGN_OR_RETURN(Rates rates, MeasureRates(self.get()));
  if (flags.disk > 0) {
    rates.disk_read_per_second = rates.disk_written_per_second =
        flags.disk * 1e9;
  } else if (const auto disk = DiskOf(config)) {
    TESSERA_RETURN_IF_ERROR(
        Annotate(MeasureDisk(*disk, self.get(), &rates), "--disk"));
  }
  if (flags.tflops > 0) {
    rates.flops_per_second = rates.half_flops_per_second = flags.tflops * 1e12;
  }
  if (flags.bandwidth > 0) rates.bytes_per_second = flags.bandwidth * 1e9;
  if (flags.network == 0 || flags.world_size == 1) return rates;
  return OverNetwork(rates, static_cast<int>(flags.world_size),
                     flags.network * 1e9, flags.latency * 1e-6);
}

absl::StatusOr<std::string> TextOf(const Flags& flags) {
  const auto world_size = static_cast<int>(flags.world_size);
  TESSERA_ASSIGN_OR_RETURN(const proto::Config config,
                           LoadConfig(flags.config, world_size));
  TESSERA_ASSIGN_OR_RETURN(const Model model, MakeModel(flags.model));
  PlanOptions options;
  options.world_size = world_size;
  options.memory_bytes =
      static_cast<int64_t>(flags.memory_gib * (int64_t{1} << 30));
  options.shared_working_copy = flags.one_host;
  TESSERA_ASSIGN_OR_RETURN(options.rates, RatesOf(flags, config));
  return PlanText(*model.module, model.loss, config, options, flags.json);
}

}  // namespace

std::string BusyNote(double load, int processors) {
  if (load <= 0.5 * processors) return "";
  return absl::StrFormat(
      "note: this host is busy (%.1f processes run on its %d processors), so "
      "what is measured here is too slow; --tflops and --bandwidth set it",
      load, processors);
}

int RunPlan(CommandCall* call) {
  Flags flags;
  if (!ReadFlags(call, &flags)) return 2;
  double load = 0;
  if ((flags.tflops == 0 || flags.bandwidth == 0) &&
      getloadavg(&load, 1) == 1) {
    const std::string note = BusyNote(load, get_nprocs());
    if (!note.empty()) call->err() << note << "\n";
  }
  const absl::StatusOr<std::string> text = TextOf(flags);
  if (!text.ok()) return call->Failed(text.status());
  call->out() << *text;
  return 0;
}

}  // namespace tessera
