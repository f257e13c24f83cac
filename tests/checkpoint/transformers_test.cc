// Models that Hugging Face's transformers have, too: what is trained here gives
// the same results there, and vice versa. The other side is
// transformers_peer.py, run by the Python that the variable TESSERA_PYTHON
// names; without it, or what a case needs of it, that case is skipped.
#include <stdio.h>
#include <sys/wait.h>
#include <torch/torch.h>

#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <limits>
#include <memory>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "base/check.h"
#include "base/status.h"
#include "checkpoint/exchange/command.h"
#include "checkpoint/safetensors.h"
#include "checkpoint/write_safetensors_test_util.h"
#include "comm/world/world.h"
#include "config/config.pb.h"
#include "engine/engine.h"
#include "examples/gpt/gpt.h"
#include "examples/llama/llama.h"
#include "examples/llama/llama_config.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/rank_pool.h"
#include "tests/support/temp_folder.h"
#include "tests/support/trainee.h"

namespace tessera {
namespace {

using at::Tensor;
using ::testing::Each;
using ::testing::StartsWith;

constexpr int64_t kLayers = 2, kDim = 32, kHeads = 4, kVocab = 67, kSeq = 16;
constexpr int64_t kHeadNumbers = 12;  // of a head, at most
constexpr int64_t kLength = 13;       // of the texts that both are given

// A model of ours, with what is needed to have it there.
struct Model {
  std::shared_ptr<torch::nn::Module> module;
  std::function<Tensor(const Tensor& tokens)> forward;
  std::string names;   // for NameMap::Load; "": the same names
  std::string config;  // config.json
  int64_t hidden = 0;
};

template <typename Holder>
Model Of(Holder holder, std::string names, std::string config, int64_t hidden) {
  return {holder.ptr(),
          [holder](const Tensor& tokens) mutable {
            return holder->forward(tokens);
          },
          std::move(names), std::move(config), hidden};
}

// Written as transformers 4 did (Llama, TiedLlama) and as 5 do. One position is
// a few radians and more, so that scaling by frequency has all of its three
// cases within a head of 12 numbers: pairs that turn once in 6.3, 19, 59, ...
// positions, of 20 that the model was made for.
std::string LlamaConfig(absl::string_view kind) {
  const std::string sizes = R"({"model_type": "llama", "hidden_size": 32,
      "num_hidden_layers": 2, "num_attention_heads": 4,
      "num_key_value_heads": 2, "intermediate_size": 44, "vocab_size": 67,
      "rms_norm_eps": 0.05, )";
  if (kind == "Llama") {
    return absl::StrCat(sizes, R"("rope_theta": 50})");
  }
  if (kind == "TiedLlama") {
    return absl::StrCat(sizes,
                        R"("rope_theta": 50, "tie_word_embeddings": true})");
  }
  if (kind == "LinearLlama") {
    return absl::StrCat(sizes, R"("attention_bias": true, "rope_parameters":
        {"rope_type": "linear", "rope_theta": 50, "factor": 3}})");
  }
  return absl::StrCat(sizes, R"("head_dim": 12, "mlp_bias": true,
      "tie_word_embeddings": true, "max_position_embeddings": 160,
      "rope_parameters": {"rope_type": "llama3", "rope_theta": 800,
        "factor": 8, "low_freq_factor": 0.5, "high_freq_factor": 2,
        "original_max_position_embeddings": 20}})");
}

// Options have unusual values where the usual one would hide that an option is
// ignored.
Model MakeModel(absl::string_view kind) {
  if (kind == "Gpt2" || kind == "UntiedGpt2") {
    GptOptions options = GptOptions().Gpt2().dim(kDim).layers(kLayers);
    options.heads(kHeads).seq(kSeq).vocab(kVocab);
    std::string own;  // beyond GPT2Config's defaults
    if (kind == "UntiedGpt2") {
      options.tied(false).gelu_tanh(false);
      own = R"("tie_word_embeddings": false, "activation_function": "gelu",)";
    }
    return Of(Gpt(options), "gpt2",
              absl::StrCat("{", own, R"("model_type": "gpt2", "n_embd": 32,
                  "n_layer": 2, "n_head": 4, "n_positions": 16,
                  "vocab_size": 67, "bos_token_id": 0, "eos_token_id": 0})"),
              4 * kDim);
  }
  const std::string config = LlamaConfig(kind);
  const auto options = ParseLlamaConfig(config, "config.json");
  TESSERA_CHECK(options.ok()) << options.status();
  return Of(Llama(*options), "", config, 44);
}

// How far logits of the two may be from each other, both in float32. On the way
// from a token to a logit n products are summed: in each layer over the width
// in two norms, in three linear layers in a row, over a head's numbers, twice
// over the text (softmax, mixing), over `hidden`; then in a norm and in the
// head. Rounding errors u = eps / 2 of a sum of n are at most lambda sqrt(n) u,
// with lambda = 4 all but certainly (Higham and Mary, 2019); both sides have
// them. Linear layers change sizes little here, so errors grow no faster than
// what they are errors of, and all are told in parts of the largest logit.
double BoundOf(const Model& model, const Tensor& logits) {
  const double n = kLayers * (4 * kDim + kHeads * kHeadNumbers + kHeadNumbers +
                              2 * kLength + model.hidden) +
                   2 * kDim;
  return 4 * std::sqrt(n) * std::numeric_limits<float>::epsilon() *
         logits.abs().max().item<double>();
}

std::string Compare(const Model& model, const Tensor& ours,
                    const Tensor& theirs) {
  if (ours.sizes() != theirs.sizes()) return "other sizes";
  const double bound = BoundOf(model, ours);
  const double far = (ours - theirs).abs().max().item<double>();
  return absl::StrFormat("%s the bound: %.3g of %.3g, %.1f%%; largest %.3g",
                         far <= bound ? "within" : "beyond", far, bound,
                         far / bound * 100, ours.abs().max().item<double>());
}

Tensor Tokens() {
  return (at::arange(2 * kLength, at::kLong).pow(3) % kVocab)
      .view({2, kLength});
}

absl::StatusOr<Tensor> ReadLogits(const std::string& path) {
  TESSERA_ASSIGN_OR_RETURN(const auto file, Safetensors::Open(path));
  const SafetensorsTensor* const found = file->Find("logits");
  if (found == nullptr) return absl::NotFoundError(path);
  const Tensor values = at::empty(found->sizes);
  TESSERA_RETURN_IF_ERROR(
      file->Read(*found, {0, values.numel()}, values.flatten()));
  return values;
}

proto::Config Stage3() {
  proto::Config config;
  config.set_train_micro_batch_size_per_gpu(1);
  config.mutable_zero_optimization()->set_stage(3);
  config.mutable_zero_optimization()->set_stage3_param_persistence_threshold(0);
  return config;
}

struct Sharded {
  Model model;
  std::unique_ptr<Engine> engine;
};

// Values differ from the initial ones, also for norms and biases.
absl::StatusOr<Sharded> Shard(const std::string& kind, uint64_t seed,
                              const World& world) {
  at::manual_seed(seed);
  Sharded sharded{MakeModel(kind), nullptr};
  {
    at::NoGradGuard no_grad;
    for (Tensor& values : sharded.model.module->parameters()) {
      values.add_(at::randn_like(values) / std::sqrt(values.size(-1)));
    }
  }
  EngineOptions options;
  options.communicator = world.communicator();
  TESSERA_ASSIGN_OR_RETURN(
      sharded.engine, Engine::Create(sharded.model.module, Stage3(), options));
  return sharded;
}

Tensor LogitsOf(const Model& model) {
  at::NoGradGuard no_grad;
  return model.forward(Tokens());
}

absl::StatusOr<NameMap> NamesOf(const Model& model) {
  return model.names.empty() ? NameMap() : NameMap::Load(model.names);
}

// args: "<kind>\n<folder>", of all rank functions. Makes, in the folder,
//   out                  SaveSafetensors
//   checkpoint           SaveCheckpoint
//   state.safetensors    what `out` has to hold, by rank 0
//   tokens.safetensors, ours.safetensors
TESSERA_RANK_FUNCTION(SaveModel) {
  const std::vector<std::string> words = absl::StrSplit(args, '\n');
  const std::string& dir = words.at(1);
  TESSERA_ASSIGN_OR_RETURN(const Sharded sharded, Shard(words.at(0), 1, world));
  const auto& [model, engine] = sharded;
  const Tensor logits = LogitsOf(model);
  SaveSafetensorsOptions options;
  options.dtype = "fp32";
  TESSERA_ASSIGN_OR_RETURN(options.names, NamesOf(model));
  TESSERA_RETURN_IF_ERROR(engine->SaveSafetensors(dir + "/out", options));
  TESSERA_RETURN_IF_ERROR(engine->SaveCheckpoint(dir + "/checkpoint"));
  TESSERA_ASSIGN_OR_RETURN(StateDict state, engine->FullStateDict());
  if (world.rank() != 0) return "saved";
  for (auto& [name, value] : state) {
    const NameMap::Name theirs = options.names.Theirs(name);
    name = theirs.name;
    if (theirs.transposed) value = value.t().contiguous();
  }
  TESSERA_RETURN_IF_ERROR(WriteSafetensors(dir + "/state.safetensors", state));
  TESSERA_RETURN_IF_ERROR(
      WriteSafetensors(dir + "/tokens.safetensors", {{"tokens", Tokens()}}));
  TESSERA_RETURN_IF_ERROR(
      WriteSafetensors(dir + "/ours.safetensors", {{"logits", logits}}));
  return "saved";
}

// Loads `theirs`, whose logits there are in theirs.logits.
TESSERA_RANK_FUNCTION(LoadModelAndCompare) {
  const std::vector<std::string> words = absl::StrSplit(args, '\n');
  TESSERA_ASSIGN_OR_RETURN(const Sharded sharded, Shard(words.at(0), 2, world));
  const auto& [model, engine] = sharded;
  LoadSafetensorsOptions options;
  TESSERA_ASSIGN_OR_RETURN(options.names, NamesOf(model));
  TESSERA_RETURN_IF_ERROR(
      engine->LoadSafetensors(words.at(1) + "/theirs", options).status());
  const Tensor ours = LogitsOf(model);
  TESSERA_ASSIGN_OR_RETURN(const Tensor theirs,
                           ReadLogits(words[1] + "/theirs.logits"));
  return Compare(model, ours, theirs);
}

// Loads negated.safetensors over the values of SaveModel.
TESSERA_RANK_FUNCTION(LoadNegated) {
  const std::vector<std::string> words = absl::StrSplit(args, '\n');
  TESSERA_ASSIGN_OR_RETURN(const Sharded sharded, Shard(words.at(0), 1, world));
  const auto& [model, engine] = sharded;
  TESSERA_ASSIGN_OR_RETURN(const StateDict before, engine->FullStateDict());
  LoadSafetensorsOptions options;
  TESSERA_ASSIGN_OR_RETURN(options.names, NamesOf(model));
  TESSERA_RETURN_IF_ERROR(
      engine->LoadSafetensors(words.at(1) + "/negated.safetensors", options)
          .status());
  TESSERA_ASSIGN_OR_RETURN(const StateDict after, engine->FullStateDict());
  for (size_t i = 0; i < before.size(); ++i) {
    if (!at::equal(before[i].second, -after[i].second)) {
      return "other values of " + before[i].first;
    }
  }
  return absl::StrCat("all of ", before.size());
}

class TransformersTest : public ::testing::TestWithParam<const char*> {
 protected:
  static constexpr int kLacksModules = 77;

  void SetUp() override {
    const char* const python = std::getenv("TESSERA_PYTHON");
    if (python == nullptr || *python == '\0') {
      GTEST_SKIP() << "TESSERA_PYTHON names no Python that has safetensors and "
                      "transformers";
    }
    python_ = python;
  }

  std::string Args() const {
    return absl::StrCat(GetParam(), "\n", dir_.path());
  }

  // Runs the peer on files in dir_; its exit code. What it said is in said_.
  int Peer(const std::string& command, const std::vector<std::string>& files) {
    std::string line = absl::StrCat(
        "HF_HUB_OFFLINE=1 HF_HOME=", dir_.path(), " TMPDIR=", dir_.path(),
        " PYTHONDONTWRITEBYTECODE=1 timeout --kill-after=5 120 ", python_,
        " tests/checkpoint/transformers_peer.py ", command);
    for (const std::string& file : files) {
      absl::StrAppend(&line, " ", dir_ / file);
    }
    said_.clear();
    FILE* const pipe = popen((line + " 2>&1").c_str(), "r");
    if (pipe == nullptr) return -1;
    for (int c = fgetc(pipe); c != EOF; c = fgetc(pipe)) {
      said_.push_back(static_cast<char>(c));
    }
    const int status = pclose(pipe);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  }

  // Our model, saved in both ways: `out`, and `exported` in several files.
  void Save() {
    ASSERT_THAT(RunOnRanks(2, "SaveModel", Args()), Each("saved"));
    const Model model = MakeModel(GetParam());
    std::vector<std::string> args = {"export", dir_ / "checkpoint",
                                     dir_ / "exported", "--dtype=fp32",
                                     "--max_file_bytes=20000"};
    if (!model.names.empty()) args.push_back("--names=" + model.names);
    std::ostringstream out, err;
    ASSERT_EQ(
        CommandLine("tessera", CheckpointCommands()).Run(args, &out, &err), 0)
        << err.str();
    for (const char* folder : {"out", "exported"}) AddConfig(folder);
  }

  void AddConfig(const std::string& folder) {
    std::filesystem::create_directories(dir_ / folder);
    std::ofstream(dir_ / folder + "/config.json")
        << MakeModel(GetParam()).config;
  }

  const TempFolder dir_;
  std::string python_, said_;
};

INSTANTIATE_TEST_SUITE_P(All, TransformersTest,
                         ::testing::Values("Gpt2", "UntiedGpt2", "Llama",
                                           "TiedLlama", "LinearLlama",
                                           "Llama3"),
                         [](const auto& info) { return info.param; });

TEST_P(TransformersTest, ThePackageSafetensorsReadsAndWritesTheSameBytes) {
  ASSERT_NO_FATAL_FAILURE(Save());
  const int code = Peer(
      "same", {"state.safetensors", "out", "exported", "negated.safetensors"});
  if (code == kLacksModules) GTEST_SKIP() << said_;
  ASSERT_EQ(code, 0) << said_;
  EXPECT_THAT(RunOnRanks(2, "LoadNegated", Args()), Each(StartsWith("all of")));
}

TEST_P(TransformersTest, OurFilesGiveTheSameLogitsThere) {
  ASSERT_NO_FATAL_FAILURE(Save());
  const int code = Peer("logits", {"tokens.safetensors", "out", "exported"});
  if (code == kLacksModules) GTEST_SKIP() << said_;
  ASSERT_EQ(code, 0) << said_;
  const auto ours = ReadLogits(dir_ / "ours.safetensors");
  for (const std::string folder : {"out", "exported"}) {
    const auto theirs = ReadLogits(dir_ / folder + ".logits");
    ASSERT_TRUE(ours.ok() && theirs.ok()) << ours.status() << theirs.status();
    const std::string result = Compare(MakeModel(GetParam()), *ours, *theirs);
    RecordProperty(folder, result);
    EXPECT_THAT(result, StartsWith("within"));
  }
}

TEST_P(TransformersTest, TheirFilesGiveTheSameLogitsHere) {
  AddConfig("config");
  ASSERT_TRUE(
      WriteSafetensors(dir_ / "tokens.safetensors", {{"tokens", Tokens()}})
          .ok());
  const int code = Peer("make", {"tokens.safetensors", "config", "theirs"});
  if (code == kLacksModules) GTEST_SKIP() << said_;
  ASSERT_EQ(code, 0) << said_;
  const auto results = RunOnRanks(2, "LoadModelAndCompare", Args());
  RecordProperty("theirs", results[0]);
  EXPECT_THAT(results, Each(StartsWith("within")));
}

}  // namespace
}  // namespace tessera
