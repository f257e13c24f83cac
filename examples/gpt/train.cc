// Trains a GPT on a text, in shards; saves, resumes, and generates text.
//
//   train --data kjv.txt --world=2 --steps 100 --sample 200
//
// trainer.cc has what uses Tessera; the model (gpt.h) does not know of it.
#include <tessera/tessera.h>

#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/time.h"
#include "base/monotonic.h"
#include "base/torch/device_ledger.h"
#include "examples/gpt/flags.h"
#include "examples/gpt/rank_memory.h"
#include "examples/gpt/report.h"
#include "examples/gpt/trainer.h"
#include "examples/text/generate.h"

namespace {

// Measures from the end of the first step on, since the first step also warms
// up.
class Speed {
 public:
  explicit Speed(int64_t tokens_per_step) : tokens_per_step_(tokens_per_step) {}

  void StepDone() {
    if (++steps_ == 1) first_end_ = tessera::MonotonicNow();
  }
  double tokens_per_second() const {
    const bool one = steps_ <= 1;
    const absl::Duration from = one ? start_ : first_end_;
    return static_cast<double>((one ? steps_ : steps_ - 1) * tokens_per_step_) /
           absl::ToDoubleSeconds(tessera::MonotonicNow() - from);
  }

 private:
  const int64_t tokens_per_step_;
  const absl::Duration start_ = tessera::MonotonicNow();
  absl::Duration first_end_;
  int64_t steps_ = 0;
};

// Trains `steps` steps and appends the losses. COLLECTIVE.
absl::Status TrainSteps(int64_t steps, Trainer& trainer,
                        tessera::ProgressBar& progress, RunReport* report,
                        std::vector<float>* losses) {
  tessera::Communicator& communicator =
      *tessera::World::Current()->communicator();
  Speed speed(trainer.tokens_per_step());
  std::string memory_text;
  for (int64_t step = 1; step <= steps; ++step) {
    TESSERA_ASSIGN_OR_RETURN(const float loss, trainer.Step());
    losses->push_back(loss);
    speed.StepDone();
    report->tokens_per_second = speed.tokens_per_second();
    if (progress.IsDue(step)) {
      const at::Device device = tessera::World::Current()->device();
      TESSERA_ASSIGN_OR_RETURN(
          const auto memory,
          GatherMemory(tessera::LedgerOf(device), communicator));
      memory_text = Describe(memory);
    }
    progress.Show(step,
                  absl::StrFormat("loss %.4f  %.0f tok/s  %s", loss,
                                  report->tokens_per_second, memory_text));
  }
  return absl::OkStatus();
}

// Does everything between the start and the report. `out` is nullptr where
// nothing should be printed. COLLECTIVE.
absl::Status Work(const TrainFlags& flags, Trainer& trainer, FILE* out,
                  RunReport* report) {
  if (!flags.resume.empty()) {
    TESSERA_RETURN_IF_ERROR(trainer.Resume(flags.resume));
    report->resumed = true;
  }
  {
    tessera::ProgressBar progress(out, flags.steps);
    TESSERA_RETURN_IF_ERROR(
        TrainSteps(flags.steps, trainer, progress, report, &report->losses));
    if (flags.held_out > 0) {
      TESSERA_ASSIGN_OR_RETURN(report->held_out_loss, trainer.HeldOutLoss());
      progress.Say(absl::StrFormat("loss of the text held out: %.6f",
                                   *report->held_out_loss));
    }
    if (!flags.save.empty()) {
      TESSERA_RETURN_IF_ERROR(trainer.Save(flags.save));
      progress.Say(absl::StrCat("saved to ", flags.save, ", step ",
                                trainer.engine().step()));
    }
  }
  RunReport after;  // too few steps to measure its speed
  tessera::ProgressBar quiet(nullptr, flags.after);
  TESSERA_RETURN_IF_ERROR(
      TrainSteps(flags.after, trainer, quiet, &after, &report->after_losses));
  if (flags.steps == 0) report->tokens_per_second = after.tokens_per_second;
  if (flags.sample.count > 0) report->sample = trainer.Sample();
  return trainer.FinishSave();
}

void SayResults(const TrainFlags& flags, const RunReport& report, FILE* out) {
  for (const float loss : report.after_losses) {
    std::fprintf(out, "next loss  %.6f  %a\n", loss, loss);
  }
  if (!report.sample.empty()) {
    std::fprintf(out, "%s|%s\n", Printable(flags.prompt).c_str(),
                 Printable(report.sample).c_str());
  }
}

absl::Status Run(int argc, char** argv) {
  TrainFlags flags;
  tessera::StartOptions options;
  options.about = "trains a byte-level GPT on a file, in shards";
  options.config = "examples/gpt/zero3.json";
  options.flags_read = [&](tessera::StartOptions* start) -> absl::Status {
    TESSERA_ASSIGN_OR_RETURN(flags, ReadTrainFlags());
    start->ignore_unknown = flags.ignore_unknown;
    start->set = ConfigKeys(flags);
    return absl::OkStatus();
  };
  TESSERA_ASSIGN_OR_RETURN(const tessera::StartedJob job,
                           tessera::Start(&argc, argv, options));
  const bool reports = job.world->rank() == 0;
  FILE* human = flags.json ? stderr : stdout;
  FILE* out = reports && !flags.quiet ? human : nullptr;
  TESSERA_ASSIGN_OR_RETURN(const std::unique_ptr<Trainer> trainer,
                           Trainer::Create(flags, job));
  RunReport report;
  report.world_size = job.world->world_size();
  report.stage = trainer->engine().stage();
  report.held = trainer->engine().state_bytes();
  report.replicated = trainer->engine().replicated_state_bytes();
  tessera::ProgressBar(out, 0).Say(
      absl::StrCat(trainer->Describe(), "\n", StateTable(report)));
  TESSERA_RETURN_IF_ERROR(Work(flags, *trainer, out, &report));
  if (out != nullptr) SayResults(flags, report, out);
  if (reports && flags.json) std::printf("%s\n", ToJson(report).c_str());
  return absl::OkStatus();
}

}  // namespace

TESSERA_MAIN(Run)
