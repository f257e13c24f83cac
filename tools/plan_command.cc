#include "tools/plan_command.h"

#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <utility>

#include "ATen/ops/randint.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
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

namespace tessera {
namespace {

constexpr char kUsage[] =
    "tessera plan --config FILE --model MODEL [--world N] [--memory GIB]\n"
    "             [--one_host] [--network GB/S] [--latency US] [--tflops N]\n"
    "             [--bandwidth GB/S] [--disk GB/S]\n"
    "    prints what each rank will hold, and how long a step takes, at every\n"
    "    stage: nothing is computed, and the model may be of any size\n"
    "    MODEL      gpt:KEY=NUMBER,... with dim, layers, heads, seq, vocab\n"
    "               llama:KEY=NUMBER,... with dim, layers, heads, kv_heads,\n"
    "               hidden, seq, vocab\n"
    "    --memory   of a rank, in GiB; sharding.memory_limit_bytes or what "
    "this\n"
    "               host has if absent\n"
    "    --one_host all ranks are on one host and share a working copy\n"
    "    --network  what a rank sends, in GB/s, and --latency, of a message, "
    "in\n"
    "               microseconds (10); without it times have no communication\n"
    "    --tflops   of a rank, --bandwidth of its memory, and --disk of what\n"
    "               it reads and writes there, in GB/s; what is absent is\n"
    "               measured here, by one process (a disk: in nvme_path)\n"
    "    The batch is train_micro_batch_size_per_gpu. For a model of your own\n"
    "    call tessera::Plan.\n";

struct Flags {
  std::string config, model;
  int world_size = 1;
  double memory_gib = 0;
  double network = 0, latency = 10, tflops = 0, bandwidth = 0, disk = 0;
  bool one_host = false;
};

// Returns the value of --network and so on; nullptr for other names.
double* NumberOf(const std::string& name, Flags* flags) {
  if (name == "--network") return &flags->network;
  if (name == "--latency") return &flags->latency;
  if (name == "--tflops") return &flags->tflops;
  if (name == "--bandwidth") return &flags->bandwidth;
  if (name == "--disk") return &flags->disk;
  return nullptr;
}

absl::Status SetFlag(const std::string& name, const std::string& value,
                     Flags* flags) {
  if (name == "--config") {
    flags->config = value;
  } else if (name == "--model") {
    flags->model = value;
  } else if (name == "--world") {
    if (!absl::SimpleAtoi(value, &flags->world_size) || flags->world_size < 1) {
      return absl::InvalidArgumentError(
          absl::StrCat("--world: expected at least 1, got '", value, "'"));
    }
  } else if (name == "--memory") {
    if (!absl::SimpleAtod(value, &flags->memory_gib) ||
        !(flags->memory_gib > 0 && flags->memory_gib < 1e6)) {
      return absl::InvalidArgumentError(absl::StrCat(
          "--memory: expected a number of GiB above 0, got '", value, "'"));
    }
  } else if (double* const number = NumberOf(name, flags)) {
    if (!absl::SimpleAtod(value, number) || !(*number > 0 && *number < 1e9)) {
      return absl::InvalidArgumentError(
          absl::StrCat(name, ": expected a number above 0, got '", value, "'"));
    }
  } else {
    return absl::InvalidArgumentError(absl::StrCat("unknown flag ", name));
  }
  return absl::OkStatus();
}

// Flags are parsed by hand, as in `tessera config`: absl's flags end the
// process with 1.
absl::StatusOr<Flags> ParseFlags(const std::vector<std::string>& args) {
  Flags flags;
  for (size_t i = 0; i < args.size(); ++i) {
    if (args[i] == "--one_host") {
      flags.one_host = true;
      continue;
    }
    if (args[i] == "--help") return absl::CancelledError("");
    const std::pair<std::string, std::string> flag =
        absl::StrSplit(args[i], absl::MaxSplits('=', 1));
    const bool joined = absl::StrContains(args[i], '=');
    if (!joined && i + 1 == args.size()) {
      return absl::InvalidArgumentError(
          absl::StrCat(args[i], " needs a value"));
    }
    TESSERA_RETURN_IF_ERROR(
        SetFlag(flag.first, joined ? flag.second : args[++i], &flags));
  }
  if (flags.config.empty() || flags.model.empty()) {
    return absl::InvalidArgumentError("--config and --model are needed");
  }
  return flags;
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
            {"hidden", defaults.hidden()}, {"seq", 128},
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

absl::StatusOr<Model> MakeModel(const std::string& text) {
  const std::pair<std::string, std::string> parts =
      absl::StrSplit(text, absl::MaxSplits(':', 1));
  if (parts.first == "gpt") return MakeGpt(parts.second);
  if (parts.first == "llama") return MakeLlama(parts.second);
  return absl::InvalidArgumentError(
      absl::StrCat("--model: expected gpt:... or llama:..., got '", text, "'"));
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
  return OverNetwork(rates, flags.world_size, flags.network * 1e9,
                     flags.latency * 1e-6);
}

absl::StatusOr<std::string> TextOf(const Flags& flags) {
  TESSERA_ASSIGN_OR_RETURN(const proto::Config config,
                           LoadConfig(flags.config, flags.world_size));
  TESSERA_ASSIGN_OR_RETURN(const Model model, MakeModel(flags.model));
  PlanOptions options;
  options.world_size = flags.world_size;
  options.memory_bytes =
      static_cast<int64_t>(flags.memory_gib * (int64_t{1} << 30));
  options.shared_working_copy = flags.one_host;
  TESSERA_ASSIGN_OR_RETURN(options.rates, RatesOf(flags, config));
  return PlanText(*model.module, model.loss, config, options);
}

}  // namespace

int RunPlanCommand(const std::vector<std::string>& args, std::ostream* out,
                   std::ostream* err) {
  const absl::StatusOr<Flags> flags = ParseFlags(args);
  if (absl::IsCancelled(flags.status())) {
    *out << kUsage;
    return 0;
  }
  if (!flags.ok()) {
    *err << flags.status().message() << "\n" << kUsage;
    return 2;
  }
  const absl::StatusOr<std::string> text = TextOf(*flags);
  if (!text.ok()) {
    *err << text.status().message() << "\n";
    return 1;
  }
  *out << *text;
  return 0;
}

}  // namespace tessera
