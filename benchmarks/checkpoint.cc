// Measures checkpoints of the peers' GPT (peer_gpt.h) with AdamW's states,
// beside what they cost at least: the same bytes written plainly and synced, by
// as many ranks, and copied plainly, by as many threads.
//
//   checkpoint --world 2 --dir /some/disk --rounds 15
//
// Each turn runs one operation in all ranks, from when all are there until all
// are done, in milliseconds of rank 0's clock. Before it the disk has written
// all that came before.
//
//   save        SaveCheckpoint into a folder that was removed
//   write       as many bytes as that checkpoint's files, a file of each rank
//   save_async  the stall of an async save: SaveCheckpoint, and directly
//               afterwards a change of a master, which has to wait until all
//               that is not written yet is copied: the longest possible stall
//   copy_fresh  a copy of as many bytes into memory fresh from the kernel
//   copy_huge   such a copy with huge pages requested from the kernel
//   copy_warm   such a copy into memory that was used before
//   load        LoadCheckpoint into a new engine, from the system's caches
//   load_cold   LoadCheckpoint into a new engine, from the disk
//   read_cold   each rank reads its own file from the disk, into one buffer
//
// It prints a table and a line of JSON; with --turns it takes turns (turns.h),
// and a line is an operation. benchmarks/peers --rows K runs DCP beside it.
#include <torch/torch.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/usage.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/time/time.h"
#include "base/memory/memory.h"
#include "base/monotonic.h"
#include "benchmarks/bare_disk.h"
#include "benchmarks/gpt/peer_gpt.h"
#include "benchmarks/program.h"
#include "benchmarks/rank_program.h"
#include "benchmarks/turns.h"
#include "benchmarks/workers.h"
#include "tessera/tessera.h"

ABSL_FLAG(std::string, dir, "", "A folder on the disk to measure.");
ABSL_FLAG(int64_t, dim, 1024, "Width of the model.");
ABSL_FLAG(int64_t, layers, 6, "Blocks.");
ABSL_FLAG(int, stage, 3, "ZeRO stage, 0 to 3.");
ABSL_FLAG(int, rounds, 15, "Rounds that are measured, after one that is not.");
ABSL_FLAG(int64_t, call_bytes, int64_t{4} << 20, "Of one plain write or read.");
ABSL_FLAG(bool, turns, false, "Take turns: see the top of turns.h.");
ABSL_FLAG(std::string, backend, "auto", "auto, shm, gloo, hierarchical, nccl.");

namespace tessera {
namespace {

constexpr int64_t kSeq = 64;
constexpr char kChanged[] = "n.weight";
const char* const kOperations[] = {"save",       "write",     "save_async",
                                   "copy_fresh", "copy_huge", "copy_warm",
                                   "load",       "load_cold", "read_cold"};

// The figures of all ranks.
struct Turn {
  double ms = 0;
  int64_t bytes = 0;       // written, copied or read
  int64_t peak_bytes = 0;  // memory beyond what was held before it
};

class Bench {
 public:
  static absl::StatusOr<std::unique_ptr<Bench>> Create(Communicator* comm) {
    auto bench = std::make_unique<Bench>(comm);
    TESSERA_RETURN_IF_ERROR(bench->Prepare());
    return bench;
  }
  explicit Bench(Communicator* comm)
      : comm_(comm), workers_(at::get_num_threads()) {}

  absl::StatusOr<Turn> Run(const std::string& operation) {
    const bool saves = absl::StartsWith(operation, "save");
    TESSERA_RETURN_IF_ERROR(
        Together(saves ? RemoveAll(dir_) : absl::OkStatus()));
    if (absl::StartsWith(operation, "load")) return Load(operation);
    if (operation == "read_cold") return Read();
    if (saves) return Save(/*async=*/operation == "save_async");
    if (operation == "write") return Write();
    if (absl::StartsWith(operation, "copy_")) return Copy(operation);
    return absl::InvalidArgumentError(
        absl::StrCat("expected one of ", absl::StrJoin(kOperations, ", "),
                     "; got '", absl::CEscape(operation), "'"));
  }
  // Returns the bytes of masters and states of the whole model.
  int64_t state_bytes() const { return 3 * 4 * numel_; }

 private:
  absl::Status Prepare() {
    torch::manual_seed(0);
    model_ = std::make_shared<PeerGpt>(
        PeerGptOptions{.dim = absl::GetFlag(FLAGS_dim),
                       .layers = absl::GetFlag(FLAGS_layers),
                       .seq = kSeq});
    for (const at::Tensor& p : model_->parameters()) numel_ += p.numel();
    config_.set_train_micro_batch_size_per_gpu(1);
    config_.mutable_optimizer()->set_type("AdamW");
    config_.mutable_zero_optimization()->set_stage(absl::GetFlag(FLAGS_stage));
    TESSERA_ASSIGN_OR_RETURN(engine_, Engine::Create(model_, config_));
    const at::Tensor inputs =
        torch::randint(PeerGptOptions::kVocabulary, {1, kSeq}, torch::kLong);
    TESSERA_RETURN_IF_ERROR(engine_->Backward(model_->Loss(inputs, inputs)));
    TESSERA_RETURN_IF_ERROR(engine_->Step());
    TESSERA_ASSIGN_OR_RETURN(changed_, engine_->Master(kChanged));
    return absl::OkStatus();
  }

  // Waits until all ranks are here, and returns the error of any.
  absl::Status Together(const absl::Status& mine) {
    return comm_->AgreeOk(mine, "benchmark");
  }
  absl::Status RemoveAll(const std::string& path) {
    if (comm_->rank() != 0) return absl::OkStatus();
    std::error_code error;
    std::filesystem::remove_all(path, error);
    return error
               ? absl::InternalError(absl::StrCat(path, ": ", error.message()))
               : absl::OkStatus();
  }
  absl::StatusOr<double> TimeOf(const std::function<absl::Status()>& work) {
    sync();
    TESSERA_RETURN_IF_ERROR(Together(absl::OkStatus()));
    const absl::Duration begin = MonotonicNow();
    TESSERA_RETURN_IF_ERROR(Together(work()));
    return absl::ToDoubleMilliseconds(MonotonicNow() - begin);
  }

  absl::StatusOr<Turn> Save(bool async) {
    Turn turn;
    // Memory that was freed and kept with the process would make a save
    // cheaper.
    ReturnKept();
    TESSERA_RETURN_IF_ERROR(Together(ResetPeakMemory()));
    TESSERA_ASSIGN_OR_RETURN(const int64_t held, MemoryLine("VmRSS"));
    SaveOptions options;
    options.async = async;
    TESSERA_ASSIGN_OR_RETURN(
        turn.ms, TimeOf([&]() -> absl::Status {
          TESSERA_RETURN_IF_ERROR(engine_->SaveCheckpoint(dir_, "", options));
          return async ? engine_->SetMaster(kChanged, changed_)
                       : absl::OkStatus();
        }));
    TESSERA_RETURN_IF_ERROR(Together(engine_->WaitForCheckpoint()));
    TESSERA_ASSIGN_OR_RETURN(const int64_t peak, MemoryLine("VmHWM"));
    TESSERA_ASSIGN_OR_RETURN(turn.peak_bytes, SumOfRanks(comm_, peak - held));
    TESSERA_ASSIGN_OR_RETURN(const int64_t share, Share());
    TESSERA_ASSIGN_OR_RETURN(turn.bytes, SumOfRanks(comm_, share));
    return turn;
  }

  // Returns a file of the checkpoint.
  absl::StatusOr<std::string> OwnFile() const {
    const std::string mine = absl::StrFormat(".rank-%05d", comm_->rank());
    std::error_code error;
    for (const auto& entry : std::filesystem::directory_iterator(dir_, error)) {
      if (entry.path().extension() == mine) return entry.path().string();
    }
    return absl::FailedPreconditionError(absl::StrCat(
        dir_, ": no checkpoint of as many ranks: 'save' comes first"));
  }
  absl::StatusOr<int64_t> Share() const {
    TESSERA_ASSIGN_OR_RETURN(const std::string mine, OwnFile());
    return static_cast<int64_t>(std::filesystem::file_size(mine));
  }

  absl::StatusOr<Turn> Write() {
    Turn turn;
    TESSERA_ASSIGN_OR_RETURN(const int64_t share, Share());
    TESSERA_ASSIGN_OR_RETURN(const FreshMemory from, FreshMemory::Map(share));
    from.Fill();
    // Remove it now, as the checkpoint before a save: whoever frees pages last
    // gets them.
    const std::string folder = absl::GetFlag(FLAGS_dir) + "/plain";
    TESSERA_RETURN_IF_ERROR(Together(RemoveAll(folder)));
    std::error_code error;
    std::filesystem::create_directories(folder, error);
    TESSERA_ASSIGN_OR_RETURN(
        turn.ms, TimeOf([&] {
          return WritePlainly(absl::StrCat(folder, "/rank-", comm_->rank()),
                              from, absl::GetFlag(FLAGS_call_bytes));
        }));
    TESSERA_ASSIGN_OR_RETURN(turn.bytes, SumOfRanks(comm_, share));
    return turn;
  }

  absl::StatusOr<Turn> Copy(const std::string& operation) {
    Turn turn;
    TESSERA_ASSIGN_OR_RETURN(const int64_t share, Share());
    TESSERA_ASSIGN_OR_RETURN(const FreshMemory from, FreshMemory::Map(share));
    from.Fill();
    TESSERA_RETURN_IF_ERROR(TouchAndFree(share));
    TESSERA_ASSIGN_OR_RETURN(const FreshMemory to, FreshMemory::Map(share));
    if (operation == "copy_huge") to.AskForHugePages();
    if (operation == "copy_warm") CopyPlainly(from, to, &workers_);
    TESSERA_ASSIGN_OR_RETURN(turn.ms, TimeOf([&] {
                               CopyPlainly(from, to, &workers_);
                               return absl::OkStatus();
                             }));
    TESSERA_ASSIGN_OR_RETURN(turn.bytes, SumOfRanks(comm_, share));
    return turn;
  }

  absl::Status SetCaches(bool cached) {
    sync();
    return Together(comm_->rank() == 0 ? SetCached(dir_, cached)
                                       : absl::OkStatus());
  }

  absl::StatusOr<Turn> Read() {
    Turn turn;
    TESSERA_ASSIGN_OR_RETURN(const FreshMemory to,
                             FreshMemory::Map(absl::GetFlag(FLAGS_call_bytes)));
    TESSERA_ASSIGN_OR_RETURN(const std::string mine, OwnFile());
    TESSERA_RETURN_IF_ERROR(SetCaches(false));
    TESSERA_ASSIGN_OR_RETURN(turn.ms,
                             TimeOf([&] { return ReadPlainly(mine, to); }));
    TESSERA_ASSIGN_OR_RETURN(const int64_t share, Share());
    TESSERA_ASSIGN_OR_RETURN(turn.bytes, SumOfRanks(comm_, share));
    return turn;
  }

  absl::StatusOr<Turn> Load(const std::string& operation) {
    Turn turn;
    TESSERA_RETURN_IF_ERROR(engine_->Close());
    engine_.reset();
    TESSERA_ASSIGN_OR_RETURN(engine_, Engine::Create(model_, config_));
    TESSERA_RETURN_IF_ERROR(SetCaches(operation == "load"));
    LoadCheckpointReport report;
    TESSERA_ASSIGN_OR_RETURN(turn.ms, TimeOf([&]() -> absl::Status {
                               TESSERA_ASSIGN_OR_RETURN(
                                   report, engine_->LoadCheckpoint(dir_));
                               return absl::OkStatus();
                             }));
    TESSERA_ASSIGN_OR_RETURN(turn.bytes, SumOfRanks(comm_, report.bytes_read));
    return turn;
  }

  Communicator* const comm_;
  const std::string dir_ = absl::GetFlag(FLAGS_dir) + "/tessera";
  Workers workers_;
  std::shared_ptr<PeerGpt> model_;
  proto::Config config_;
  std::unique_ptr<Engine> engine_;
  int64_t numel_ = 0;
  at::Tensor changed_;
};

// Returns "[0.9, 1, 1.1]": least, median and largest ratio of a round's times.
std::string Ratio(std::map<std::string, std::vector<double>>& ms,
                  const char* numerator, const char* denominator) {
  const std::vector<double> ratios = Ratios(ms[numerator], ms[denominator]);
  const auto [least, most] = std::minmax_element(ratios.begin(), ratios.end());
  return absl::StrFormat("[%.3f, %.3f, %.3f]", *least, Median(ratios), *most);
}

absl::Status RunRounds(Bench* bench, const World& world) {
  std::map<std::string, std::vector<double>> ms;
  std::map<std::string, Turn> last;
  int64_t peak = 0;
  const int rounds = absl::GetFlag(FLAGS_rounds);
  std::mt19937 random(1);  // the same order on all ranks
  std::vector<std::string> order(std::begin(kOperations),
                                 std::end(kOperations));
  for (int round = -1; round < rounds; ++round) {
    // The other operations need a checkpoint.
    if (round >= 0) std::shuffle(order.begin(), order.end(), random);
    for (const std::string& operation : order) {
      TESSERA_ASSIGN_OR_RETURN(const Turn turn, bench->Run(operation));
      if (round >= 0) ms[operation].push_back(turn.ms);
      last[operation] = turn;
      peak = std::max(peak, turn.peak_bytes);
    }
  }
  if (world.rank() != 0) return absl::OkStatus();
  std::vector<std::string> medians;
  for (const char* operation : kOperations) {
    const double median = Median(ms[operation]);
    const double bytes = static_cast<double>(last[operation].bytes);
    absl::PrintF("%-12s %8.1f ms %6.2f GB/s\n", operation, median,
                 bytes / median * 1e-6);
    medians.push_back(absl::StrFormat("\"%s\": %.2f", operation, median));
  }
  const double state = static_cast<double>(bench->state_bytes());
  absl::PrintF(
      R"({"benchmark": "checkpoint", "world": %d, "stage": %d, "rounds": %d, )"
      R"("state_bytes": %d, "median_ms": {%s}, "write_over_save": %s, )"
      R"("stall_over_copy_fresh": %s, "stall_over_copy_huge": %s, )"
      R"("stall_over_copy_warm": %s, "load_cold_over_read_cold": %s, )"
      R"("read_over_state": %.4f, "peak_over_state": %.4f})"
      "\n",
      world.world_size(), absl::GetFlag(FLAGS_stage), rounds,
      bench->state_bytes(), absl::StrJoin(medians, ", "),
      Ratio(ms, "write", "save"), Ratio(ms, "save_async", "copy_fresh"),
      Ratio(ms, "save_async", "copy_huge"),
      Ratio(ms, "save_async", "copy_warm"), Ratio(ms, "load_cold", "read_cold"),
      static_cast<double>(last["load"].bytes) / state,
      static_cast<double>(peak) / state);
  absl::FPrintF(
      stderr, "without PyTorch's DCP; benchmarks/peers --rows K installs it\n");
  return absl::OkStatus();
}

void PrintTurn(const Turn& turn, int64_t state_bytes) {
  absl::PrintF(
      R"({"ms": %.4f, "bytes": %d, "peak_bytes": %d, "state_bytes": %d})"
      "\n",
      turn.ms, turn.bytes, turn.peak_bytes, state_bytes);
  std::fflush(stdout);
}

absl::Status TakeTurns(Bench* bench) {
  while (const std::optional<std::string> line = NextLine()) {
    TESSERA_ASSIGN_OR_RETURN(const Turn turn, bench->Run(*line));
    PrintTurn(turn, bench->state_bytes());
  }
  return absl::OkStatus();
}

absl::Status CheckFlags(const std::vector<char*>& words) {
  TESSERA_RETURN_IF_ERROR(FlagsAlone(words));
  TESSERA_RETURN_IF_ERROR(AtLeast(8, FLAGS_dim));
  TESSERA_RETURN_IF_ERROR(
      AtLeast(1, FLAGS_layers, FLAGS_rounds, FLAGS_call_bytes));
  if (absl::GetFlag(FLAGS_dim) % PeerGptOptions().heads != 0) {
    return absl::InvalidArgumentError("--dim: expected a multiple of 8");
  }
  if (absl::GetFlag(FLAGS_dir).empty()) {
    return absl::InvalidArgumentError("--dir FOLDER is missing");
  }
  return absl::OkStatus();
}

absl::Status Run(int argc, char** argv) {
  absl::SetProgramUsageMessage("measures checkpoints; see --helpfull");
  TESSERA_ASSIGN_OR_RETURN(const std::vector<char*> words,
                           ReadTurnFlags(argc, argv, FLAGS_turns));
  TESSERA_RETURN_IF_ERROR(CheckFlags(words));
  WorldOptions options;
  options.backend = absl::GetFlag(FLAGS_backend);
  TESSERA_ASSIGN_OR_RETURN(const World* world, Init(&argc, argv, options));
  const bool turns = absl::GetFlag(FLAGS_turns);
  if (turns) {
    PrintTurn({}, 0);
    (void)NextLine();
  }
  TESSERA_ASSIGN_OR_RETURN(const auto bench,
                           Bench::Create(world->communicator().get()));
  return turns ? TakeTurns(bench.get()) : RunRounds(bench.get(), *world);
}

}  // namespace
}  // namespace tessera

int main(int argc, char** argv) {
  return tessera::RunRank("checkpoint", argc, argv, tessera::Run);
}
