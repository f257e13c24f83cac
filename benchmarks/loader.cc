// Measures what a DataLoader costs:
//
//   bazel-bin/benchmarks/loader --mib 1024 --rounds 31
//     [--only step]
//
//   tokens   batches of a mapped file of 16-bit tokens as int64, in a random
//            order, requested as fast as they come, against a plain loop: one
//            thread reads the same samples from the mapping in the same order
//            and adds up their 64-bit words. By the number of workers; 0 is
//            Fetch in Next
//   step     forward, backward and update of a small GPT (plain libtorch, one
//            thread) on such batches: the fraction of a step that waits for
//            data
//
// Rounds of the plain loop and of each loader are interleaved; a ratio is that
// of the loader's rate to the plain loop's in adjacent rounds. It prints a line
// of JSON for each: medians over rounds, and the interval from the minimum to
// the maximum. The file is made in TMPDIR and removed again.
#include <torch/torch.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "absl/flags/flag.h"
#include "absl/flags/usage.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/bits.h"
#include "base/env.h"
#include "base/monotonic.h"
#include "base/status.h"
#include "base/torch_guard.h"
#include "benchmarks/gpt/peer_gpt.h"
#include "benchmarks/program.h"
#include "data/distributed_order.h"
#include "data/text/token_corpus.h"
#include "data/text/token_file.h"
#include "loader/data_loader.h"

ABSL_FLAG(int64_t, mib, 1024, "Size of the file.");
ABSL_FLAG(int, rounds, 31, "Rounds that are measured.");
ABSL_FLAG(int64_t, seq, 1024, "Tokens of a sample.");
ABSL_FLAG(int64_t, batch, 32, "Samples of a batch, for the rate.");
ABSL_FLAG(int64_t, batches, 512, "Batches of a round.");
ABSL_FLAG(int64_t, steps, 40, "Steps that are measured.");
ABSL_FLAG(std::string, only, "", "Figures whose names contain this.");

namespace tessera {
namespace {

// ---- the tokens

// A mapped file of random tokens, removed with the object.
class Tokens {
 public:
  static absl::StatusOr<Tokens> Make(int64_t bytes) {
    std::string path =
        EnvString("TMPDIR").value_or("/tmp") + "/tessera_loader_XXXXXX";
    const int fd = mkstemp(path.data());
    if (fd < 0) {
      return absl::UnavailableError(
          absl::StrCat("cannot make a file like ", path));
    }
    close(fd);
    const absl::Cleanup remove = [&] { unlink(path.c_str()); };
    std::ofstream file(path, std::ios::binary);
    std::vector<uint64_t> block(1 << 17);
    uint64_t state = 0;
    for (int64_t done = 0; done < bytes && file;
         done += static_cast<int64_t>(block.size() * 8)) {
      for (uint64_t& word : block) word = MixBits(state += kMixStep);
      file.write(reinterpret_cast<const char*>(block.data()),
                 static_cast<std::streamsize>(block.size() * 8));
    }
    file.close();
    if (!file) {
      return absl::ResourceExhaustedError(
          absl::StrCat("cannot write ", bytes, " bytes to ", path));
    }
    TESSERA_ASSIGN_OR_RETURN(
        TokenCorpus corpus,
        TokenCorpus::OpenFiles({path}, {TokenType::kUint16, 65536}));
    return Tokens(std::move(corpus));
  }

  const TokenCorpus& corpus() const { return *corpus_; }
  // Returns the sum of the 64-bit words of a sample.
  uint64_t Sum(int64_t index, int64_t seq) const {
    const auto* const words = reinterpret_cast<const uint64_t*>(
        corpus_->files()[0].bytes().data() + index * seq * 2);
    uint64_t sum = 0;
    for (int64_t i = 0; i < seq / 4; ++i) sum += words[i];
    return sum;
  }

 private:
  explicit Tokens(TokenCorpus corpus)
      : corpus_(std::make_shared<TokenCorpus>(std::move(corpus))) {}
  std::shared_ptr<TokenCorpus> corpus_;
};

Fetch FetchTokens(const Tokens& tokens, int64_t seq) {
  return [tokens, seq](absl::Span<const int64_t> indices,
                       const BatchContext& context)
             -> absl::StatusOr<std::vector<at::Tensor>> {
    const at::Tensor batch = context.Empty(
        {static_cast<int64_t>(indices.size()), seq + 1}, at::kLong);
    TESSERA_RETURN_IF_ERROR(tokens.corpus().CopySamples(
        indices, seq,
        absl::MakeSpan(batch.data_ptr<int64_t>(),
                       static_cast<size_t>(batch.numel()))));
    return std::vector<at::Tensor>{batch};
  };
}

absl::StatusOr<std::unique_ptr<SampleOrder>> MakeOrder(const Tokens& tokens,
                                                       int64_t seq) {
  DistributedSamplerOptions options;
  options.num_samples = tokens.corpus().num_samples(seq);
  return DistributedOrder::Create(options);
}

absl::StatusOr<std::unique_ptr<DataLoader>> MakeLoader(const Tokens& tokens,
                                                       int64_t seq,
                                                       int64_t batch,
                                                       int workers) {
  TESSERA_ASSIGN_OR_RETURN(auto order, MakeOrder(tokens, seq));
  DataLoaderOptions options;
  options.batch_size = batch;
  options.workers = workers;
  options.prefetch = 4;
  return DataLoader::Create(std::move(order), FetchTokens(tokens, seq),
                            options);
}

// ---- what is measured

using Body = std::function<absl::Status()>;  // a round

absl::StatusOr<Body> PlainLoop(const Tokens& tokens) {
  const int64_t seq = absl::GetFlag(FLAGS_seq);
  TESSERA_ASSIGN_OR_RETURN(std::shared_ptr<SampleOrder> order,
                           MakeOrder(tokens, seq));
  return Body([tokens, seq, order] {
    uint64_t sum = 0;
    for (int64_t i = 0; i < absl::GetFlag(FLAGS_batches); ++i) {
      for (const Sample& sample :
           order->NextBatch(absl::GetFlag(FLAGS_batch))) {
        sum += tokens.Sum(sample.index, seq);
      }
    }
    // This makes the compiler keep the sum.
    asm volatile("" : : "r"(sum) : "memory");
    return absl::OkStatus();
  });
}

absl::StatusOr<Body> LoaderLoop(const Tokens& tokens, int workers) {
  TESSERA_ASSIGN_OR_RETURN(std::shared_ptr<DataLoader> loader,
                           MakeLoader(tokens, absl::GetFlag(FLAGS_seq),
                                      absl::GetFlag(FLAGS_batch), workers));
  return Body([loader] {
    for (int64_t i = 0; i < absl::GetFlag(FLAGS_batches); ++i) {
      TESSERA_RETURN_IF_ERROR(loader->Next());
    }
    return absl::OkStatus();
  });
}

struct Rounds {
  void Add(const Times& plain, const Times& loader) {
    ratios.push_back(plain.wall / loader.wall);
    cpu_ratios.push_back(plain.cpu / loader.cpu);
    plain_times.push_back(plain.wall);
    times.push_back(loader.wall);
  }
  std::vector<double> ratios, cpu_ratios, plain_times, times;
};

void Print(size_t workers, const Rounds& rounds) {
  const auto batches = static_cast<double>(absl::GetFlag(FLAGS_batches));
  const double gigabytes = 2e-9 * batches *
                           static_cast<double>(absl::GetFlag(FLAGS_batch) *
                                               (absl::GetFlag(FLAGS_seq) + 1));
  const auto [least, most] =
      std::minmax_element(rounds.ratios.begin(), rounds.ratios.end());
  std::printf(
      "{\"figure\": \"tokens, %zu workers\", \"ratio\": %.3f, \"least\": "
      "%.3f, \"most\": %.3f, \"cpu_ratio\": %.3f, \"gb_s\": %.3f, "
      "\"plain_gb_s\": %.3f, \"batch_us\": %.1f}\n",
      workers, Median(rounds.ratios), *least, *most, Median(rounds.cpu_ratios),
      gigabytes / Median(rounds.times), gigabytes / Median(rounds.plain_times),
      1e6 * Median(rounds.times) / batches);
}

absl::Status MeasureRate(const Tokens& tokens) {
  constexpr int kMostWorkers = 2;
  TESSERA_ASSIGN_OR_RETURN(const Body plain, PlainLoop(tokens));
  std::vector<Body> loaders;
  for (int workers = 0; workers <= kMostWorkers; ++workers) {
    TESSERA_ASSIGN_OR_RETURN(loaders.emplace_back(),
                             LoaderLoop(tokens, workers));
  }
  std::vector<Rounds> rounds(loaders.size());
  for (int round = -2; round < absl::GetFlag(FLAGS_rounds); ++round) {
    for (size_t i = 0; i < loaders.size(); ++i) {
      TESSERA_ASSIGN_OR_RETURN(const Times before, TimesOf(plain));
      TESSERA_ASSIGN_OR_RETURN(const Times loader, TimesOf(loaders[i]));
      TESSERA_ASSIGN_OR_RETURN(const Times after, TimesOf(plain));
      if (round < 0) continue;  // the first rounds touch memory
      rounds[i].Add({(before.wall + after.wall) / 2,  //
                     (before.cpu + after.cpu) / 2},
                    loader);
    }
  }
  for (size_t i = 0; i < rounds.size(); ++i) Print(i, rounds[i]);
  return absl::OkStatus();
}

// A step takes some tens of milliseconds; shorter steps would wait more easily.
absl::Status MeasureStep(const Tokens& tokens, int workers) {
  constexpr int64_t kBatch = 8, kWarmUp = 5;
  PeerGptOptions shape;
  shape.dim = 128;
  shape.layers = 2;
  shape.heads = 4;
  shape.seq = 64;
  PeerGpt model(shape);
  torch::optim::SGD optimizer(model.parameters(), 0.01);
  TESSERA_ASSIGN_OR_RETURN(const auto loader,
                           MakeLoader(tokens, shape.seq, kBatch, workers));
  std::vector<double> steps;
  absl::Duration waited;
  for (int64_t i = 0; i < kWarmUp + absl::GetFlag(FLAGS_steps); ++i) {
    if (i == kWarmUp) waited = loader->stats().waited;
    const absl::Duration begin = MonotonicNow();
    TESSERA_ASSIGN_OR_RETURN(const Batch batch, loader->Next());
    // The model has 256 tokens.
    const at::Tensor text = batch.tensors[0].bitwise_and(0xFF);
    optimizer.zero_grad();
    model
        .Loss(text.slice(1, 0, shape.seq).contiguous(),
              text.slice(1, 1, shape.seq + 1).contiguous())
        .backward();
    optimizer.step();
    if (i >= kWarmUp) {
      steps.push_back(absl::ToDoubleSeconds(MonotonicNow() - begin));
    }
  }
  waited = loader->stats().waited - waited;
  double all = 0;
  for (const double step : steps) all += step;
  std::printf(
      "{\"figure\": \"step, %d workers\", \"wait_percent\": %.4f, "
      "\"wait_us\": %.2f, \"step_ms\": %.2f, \"ready\": %.2f}\n",
      workers, 100 * absl::ToDoubleSeconds(waited) / all,
      1e6 * absl::ToDoubleSeconds(waited) / static_cast<double>(steps.size()),
      1e3 * Median(steps), loader->stats().ready);
  return absl::OkStatus();
}

absl::Status Run(int argc, char** argv) {
  absl::SetProgramUsageMessage("measures what a data loader costs");
  TESSERA_RETURN_IF_ERROR(ReadFlags(argc, argv));
  TESSERA_RETURN_IF_ERROR(AtLeast(1, FLAGS_mib, FLAGS_rounds, FLAGS_seq,
                                  FLAGS_batch, FLAGS_batches, FLAGS_steps));
  at::set_num_threads(1);
  TESSERA_ASSIGN_OR_RETURN(const Tokens tokens,
                           Tokens::Make(absl::GetFlag(FLAGS_mib) << 20));
  const std::string only = absl::GetFlag(FLAGS_only);
  if (absl::StrContains("tokens", only)) {
    TESSERA_RETURN_IF_ERROR(MeasureRate(tokens));
  }
  if (!absl::StrContains("step", only)) return absl::OkStatus();
  for (const int workers : {0, 1, 2}) {
    TESSERA_RETURN_IF_ERROR(MeasureStep(tokens, workers));
  }
  return absl::OkStatus();
}

}  // namespace
}  // namespace tessera

int main(int argc, char** argv) {
  return tessera::EndOf("loader", tessera::CatchTorch("libtorch", [&] {
                          return tessera::Run(argc, argv);
                        }));
}
