// Measures what monitors and progress add to a step, on a GPT of the demo's
// size:
//
//   bazel run //benchmarks:monitors -- --world 2 --rounds 60 --folder /tmp/out
//
//   plain     steps of an engine with nothing enabled
//   watched   such steps with tensorboard, csv_monitor, jsonl_monitor and
//             steps_per_print 10, and a ProgressBar that is shown each step
//   ratio     of a pair of steps, watched / plain: by the clock (wall), from a
//             barrier to the next, and by the processor time of all ranks
//             (cpu), which is steadier on a machine that others use
//
// Both are trained side by side, their steps interleaved, the first of a pair
// alternating. Prints one line of JSON: medians in ms, the median of the
// ratios, and the quotient of all steps' processor time (cpu_total).
#include <torch/torch.h>

#include <algorithm>
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/usage.h"
#include "absl/strings/str_format.h"
#include "benchmarks/gpt/peer_gpt.h"
#include "benchmarks/program.h"
#include "benchmarks/rank_program.h"
#include "tessera/tessera.h"

ABSL_FLAG(int, stage, 3, "ZeRO stage, 0 to 3.");
ABSL_FLAG(int, rounds, 60, "Pairs that are measured, after two that are not.");
ABSL_FLAG(int64_t, batch, 4, "Samples of a rank's step.");
ABSL_FLAG(int64_t, layers, 6, "Blocks of the GPT.");
ABSL_FLAG(int64_t, dim, 384, "Its width, a multiple of 6.");
ABSL_FLAG(std::string, folder, "", "Where the monitors write.");

namespace tessera {
namespace {

class Training {
 public:
  absl::Status Make(bool watched, FILE* out) {
    torch::manual_seed(1);
    PeerGptOptions options;
    options.dim = absl::GetFlag(FLAGS_dim);
    options.layers = absl::GetFlag(FLAGS_layers);
    options.heads = 6;
    options.seq = 128;
    model_ = std::make_shared<PeerGpt>(options);
    tokens_ =
        torch::randint(256, {absl::GetFlag(FLAGS_batch), 128}, torch::kLong);
    proto::Config config;
    config.set_train_micro_batch_size_per_gpu(absl::GetFlag(FLAGS_batch));
    config.mutable_zero_optimization()->set_stage(absl::GetFlag(FLAGS_stage));
    config.mutable_optimizer()->set_type("AdamW");
    if (watched) {
      for (proto::TensorBoard* section :
           {config.mutable_tensorboard(), config.mutable_csv_monitor()}) {
        section->set_enabled(true);
        section->set_output_path(absl::GetFlag(FLAGS_folder));
      }
      config.mutable_jsonl_monitor()->set_enabled(true);
      config.mutable_jsonl_monitor()->set_output_path(
          absl::GetFlag(FLAGS_folder));
      config.set_steps_per_print(10);
      bar_ = std::make_unique<ProgressBar>(out, absl::GetFlag(FLAGS_rounds));
    }
    TESSERA_ASSIGN_OR_RETURN(engine_, Engine::Create(model_, config));
    return absl::OkStatus();
  }

  // Makes one step, from a barrier to the next; it is measured if `round` > 0.
  absl::Status Step(Communicator* comm, int round) {
    TESSERA_ASSIGN_OR_RETURN(
        const Times times, TimesOfRanks(comm, [&]() -> absl::Status {
          const at::Tensor loss = model_->Loss(tokens_, tokens_);
          TESSERA_RETURN_IF_ERROR(engine_->Backward(loss));
          TESSERA_RETURN_IF_ERROR(engine_->Step());
          if (bar_ == nullptr) return absl::OkStatus();
          bar_->Show(std::max(1, round),
                     absl::StrFormat("loss %.4f", loss.item<float>()));
          return absl::OkStatus();
        }));
    if (round <= 0) return absl::OkStatus();
    wall_ms_.push_back(times.wall * 1e3);
    cpu_ms_.push_back(times.cpu * 1e3);
    return absl::OkStatus();
  }

  absl::Status Close() { return engine_->Close(); }
  const std::vector<double>& wall_ms() const { return wall_ms_; }
  const std::vector<double>& cpu_ms() const { return cpu_ms_; }

 private:
  std::shared_ptr<PeerGpt> model_;
  at::Tensor tokens_;
  std::unique_ptr<Engine> engine_;
  std::unique_ptr<ProgressBar> bar_;
  std::vector<double> wall_ms_, cpu_ms_;
};

double Sum(const std::vector<double>& values) {
  double sum = 0;
  for (const double value : values) sum += value;
  return sum;
}

absl::Status Run(int argc, char** argv) {
  absl::SetProgramUsageMessage("measures what monitors take of a step");
  TESSERA_RETURN_IF_ERROR(ReadRankFlags(argc, argv));
  TESSERA_ASSIGN_OR_RETURN(const World* world, Init(&argc, argv));
  if (absl::GetFlag(FLAGS_folder).empty()) {
    return absl::InvalidArgumentError("--folder: expected one to write to");
  }
  Communicator* const comm = world->communicator().get();
  // It writes to a file, as a job's log is.
  FILE* const out = world->rank() == 0 ? std::fopen("/dev/null", "w") : nullptr;
  Training plain, watched;
  TESSERA_RETURN_IF_ERROR(plain.Make(/*watched=*/false, nullptr));
  TESSERA_RETURN_IF_ERROR(watched.Make(/*watched=*/true, out));
  for (int round = -1; round <= absl::GetFlag(FLAGS_rounds); ++round) {
    Training* const pair[] = {&plain, &watched};
    const int first = round & 1;
    TESSERA_RETURN_IF_ERROR(pair[first]->Step(comm, round));
    TESSERA_RETURN_IF_ERROR(pair[1 - first]->Step(comm, round));
  }
  TESSERA_RETURN_IF_ERROR(watched.Close());
  TESSERA_RETURN_IF_ERROR(plain.Close());
  if (world->rank() != 0) return absl::OkStatus();
  std::printf(
      "{\"stage\": %d, \"world\": %d, \"rounds\": %d, \"plain_ms\": %.3f, "
      "\"watched_ms\": %.3f, \"plain_cpu_ms\": %.3f, \"watched_cpu_ms\": %.3f, "
      "\"wall_ratio\": %.5f, \"cpu_ratio\": %.5f, \"cpu_total\": %.5f}\n",
      absl::GetFlag(FLAGS_stage), world->world_size(),
      absl::GetFlag(FLAGS_rounds), Median(plain.wall_ms()),
      Median(watched.wall_ms()), Median(plain.cpu_ms()),
      Median(watched.cpu_ms()),
      Median(Ratios(watched.wall_ms(), plain.wall_ms())),
      Median(Ratios(watched.cpu_ms(), plain.cpu_ms())),
      Sum(watched.cpu_ms()) / Sum(plain.cpu_ms()));
  return absl::OkStatus();
}

}  // namespace
}  // namespace tessera

int main(int argc, char** argv) {
  return tessera::RunRank("monitors", argc, argv, tessera::Run);
}
