// Measures a loss whose logits are computed in chunks (LinearCrossEntropy)
// beside the plain one, forward and backward, on the CPU:
//
//   bazel run -c opt //benchmarks:loss -- --tokens 4096 --dim 256 --words 32000
//
//   ratio       of the processor times of a round, each way to the plain loss;
//               steadier than the wall's on a machine that others use
//   peak_ratio  of the most bytes of tensors at any moment, what was there
//               before left out
//
// Rounds of all ways are interleaved, in another order each time. Prints for
// each way one line of JSON: medians, the ratios' median, least and largest.
#include <torch/torch.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/usage.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/step_memory/step_memory.h"
#include "base/torch/tensor_memory.h"
#include "base/torch_guard.h"
#include "benchmarks/program.h"
#include "nn/linear_cross_entropy.h"

ABSL_FLAG(int64_t, tokens, 4096, "Tokens of a loss.");
ABSL_FLAG(int64_t, dim, 256, "Width of the model.");
ABSL_FLAG(int64_t, words, 32000, "Vocabulary.");
ABSL_FLAG(std::string, dtype, "fp32", "fp32 or bf16.");
ABSL_FLAG(std::vector<std::string>, chunks,
          (std::vector<std::string>{"0", "256", "4096"}),
          "Chunks, in tokens; 0: the default.");
ABSL_FLAG(int, threads, 1, "Of libtorch.");
ABSL_FLAG(int, rounds, 11, "Rounds that are measured, after one that is not.");

namespace tessera {
namespace {

struct Inputs {
  at::Tensor hidden, weight, targets;
};

struct Way {
  std::string name;
  std::function<at::Tensor(const Inputs&)> loss;
  std::vector<double> ms = {}, cpu_ms = {};  // each round's
  int64_t peak_bytes = 0;
};

at::Tensor PlainLoss(const Inputs& in) {
  return torch::cross_entropy_loss(
      at::linear(in.hidden, in.weight).to(at::kFloat), in.targets);
}

absl::StatusOr<std::vector<Way>> WaysOfFlags() {
  std::vector<Way> ways = {{"plain", &PlainLoss}};
  for (const std::string& text : absl::GetFlag(FLAGS_chunks)) {
    LinearCrossEntropyOptions options;
    if (!absl::SimpleAtoi(text, &options.chunk) || options.chunk < 0) {
      return absl::InvalidArgumentError(
          absl::StrCat("--chunks: expected numbers, got '", text, "'"));
    }
    const int64_t chunk =
        options.chunk > 0 ? options.chunk
                          : LinearCrossEntropyChunk(absl::GetFlag(FLAGS_words));
    ways.push_back({absl::StrCat("chunks of ", chunk,
                                 options.chunk == 0 ? ", the default" : ""),
                    [options](const Inputs& in) {
                      return LinearCrossEntropy(in.hidden, in.weight,
                                                in.targets, options);
                    }});
  }
  return ways;
}

void RunOnce(const Inputs& in, const Way& way) {
  way.loss(in).backward();
  in.hidden.mutable_grad().reset();
  in.weight.mutable_grad().reset();
}

void Measure(const Inputs& in, std::vector<Way>* ways) {
  StepMemory& memory = StepMemory::Global();
  const StepMemory::Training training;
  std::mt19937 random(1);
  std::vector<Way*> order;
  for (Way& way : *ways) order.push_back(&way);
  for (int round = -1; round < absl::GetFlag(FLAGS_rounds); ++round) {
    std::shuffle(order.begin(), order.end(), random);
    for (Way* const way : order) {
      (void)memory.EndStep();
      const int64_t before = memory.tensor_bytes();
      const Times begin = Times::Now();
      RunOnce(in, *way);
      const Times times = Times::Now() - begin;
      if (round >= 0) {
        way->ms.push_back(times.wall * 1e3);
        way->cpu_ms.push_back(times.cpu * 1e3);
      }
      way->peak_bytes =
          std::max(way->peak_bytes, memory.EndStep().peak_bytes - before);
    }
  }
}

void Print(const Way& way, const Way& plain) {
  const std::vector<double> ratios = Ratios(way.cpu_ms, plain.cpu_ms);
  const auto [least, largest] =
      std::minmax_element(ratios.begin(), ratios.end());
  absl::PrintF(
      R"({"benchmark": "loss", "way": "%s", "tokens": %d, "dim": %d, )"
      R"("words": %d, "dtype": "%s", "threads": %d, "ms": %.1f, "cpu_ms": %.1f, )"
      R"("ratio": %.3f, "least": %.3f, "largest": %.3f, "peak_mb": %.1f, )"
      R"("peak_ratio": %.3f})"
      "\n",
      way.name, absl::GetFlag(FLAGS_tokens), absl::GetFlag(FLAGS_dim),
      absl::GetFlag(FLAGS_words), absl::GetFlag(FLAGS_dtype),
      absl::GetFlag(FLAGS_threads), Median(way.ms), Median(way.cpu_ms),
      Median(ratios), *least, *largest,
      static_cast<double>(way.peak_bytes) / 1e6,
      static_cast<double>(way.peak_bytes) /
          static_cast<double>(plain.peak_bytes));
}

absl::Status Run(int argc, char** argv) {
  absl::SetProgramUsageMessage("measures a loss in chunks; see --helpfull");
  TESSERA_RETURN_IF_ERROR(ReadFlags(argc, argv));
  TESSERA_RETURN_IF_ERROR(AtLeast(1, FLAGS_tokens, FLAGS_dim, FLAGS_words,
                                  FLAGS_threads, FLAGS_rounds));
  const std::string dtype = absl::GetFlag(FLAGS_dtype);
  if (dtype != "fp32" && dtype != "bf16") {
    return absl::InvalidArgumentError(
        absl::StrCat("--dtype: expected fp32 or bf16, got '", dtype, "'"));
  }
  TESSERA_ASSIGN_OR_RETURN(std::vector<Way> ways, WaysOfFlags());
  at::set_num_threads(absl::GetFlag(FLAGS_threads));
  CountTensorMemory();
  torch::manual_seed(0);
  const at::ScalarType type = dtype == "bf16" ? at::kBFloat16 : at::kFloat;
  const int64_t tokens = absl::GetFlag(FLAGS_tokens),
                dim = absl::GetFlag(FLAGS_dim),
                words = absl::GetFlag(FLAGS_words);
  const Inputs in = {
      torch::randn({tokens, dim}).to(type).requires_grad_(),
      torch::randn({words, dim}).mul_(0.02).to(type).requires_grad_(),
      torch::randint(words, {tokens}, torch::kLong)};
  Measure(in, &ways);
  for (const Way& way : ways) Print(way, ways[0]);
  return absl::OkStatus();
}

}  // namespace
}  // namespace tessera

int main(int argc, char** argv) {
  return tessera::EndOf("loss", tessera::CatchTorch("libtorch", [&] {
                          return tessera::Run(argc, argv);
                        }));
}
