// Trains a GPT on a text, in shards; saves, resumes, and generates text.
//
//   train --data kjv.txt --world=2 --steps 100 --sample 200
//
// trainer.cc has what uses Tessera; the model (gpt.h) does not know of it.
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "ATen/Functions.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/torch/device_ledger.h"
#include "examples/gpt/flags.h"
#include "examples/gpt/rank_memory.h"
#include "examples/gpt/report.h"
#include "examples/gpt/trainer.h"
#include "examples/text/generate.h"
#include "tessera/tessera.h"

namespace {

// Trains `steps` steps and appends the losses. COLLECTIVE.
absl::Status TrainSteps(int64_t steps, Trainer& trainer,
                        tessera::Progress& progress,
                        std::vector<float>* losses) {
  std::string memory_text;
  for (int64_t step = 1; step <= steps; ++step) {
    TESSERA_ASSIGN_OR_RETURN(const float loss, trainer.Step());
    losses->push_back(loss);
    if (progress.IsDue()) {
      const tessera::World& world = *tessera::World::Current();
      TESSERA_ASSIGN_OR_RETURN(const auto memory,
                               GatherMemory(tessera::LedgerOf(world.device()),
                                            *world.communicator()));
      memory_text = Describe(memory);
    }
    // It is the mean over ranks already.
    TESSERA_RETURN_IF_ERROR(progress.Show(at::full({}, loss), memory_text));
  }
  return absl::OkStatus();
}

// Does everything between the start and the report. `out` is nullptr where
// nothing should be printed. COLLECTIVE.
absl::Status Work(const TrainFlags& flags, Trainer& trainer, FILE* out,
                  RunReport* report) {
  tessera::Engine* const engine = &trainer.engine();
  if (!flags.resume.empty()) {
    TESSERA_RETURN_IF_ERROR(trainer.Resume(flags.resume));
    report->resumed = true;
  }
  {
    tessera::Progress progress(
        engine, {.steps = engine->step() + flags.steps, .out = out});
    TESSERA_RETURN_IF_ERROR(
        TrainSteps(flags.steps, trainer, progress, &report->losses));
    report->tokens_per_second = progress.tokens_per_second();
    if (flags.held_out > 0) {
      TESSERA_ASSIGN_OR_RETURN(report->held_out_loss, trainer.HeldOutLoss());
      progress.Say(absl::StrFormat("loss of the text held out: %.6f",
                                   *report->held_out_loss));
    }
    if (!flags.save.empty()) {
      TESSERA_RETURN_IF_ERROR(trainer.Save(flags.save));
      progress.Say(
          absl::StrCat("saved to ", flags.save, ", step ", engine->step()));
    }
  }
  tessera::Progress quiet(
      engine, {.steps = engine->step() + flags.after, .out = nullptr});
  TESSERA_RETURN_IF_ERROR(
      TrainSteps(flags.after, trainer, quiet, &report->after_losses));
  if (flags.steps == 0) report->tokens_per_second = quiet.tokens_per_second();
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
  return trainer->Close();
}

}  // namespace

TESSERA_MAIN(Run)
