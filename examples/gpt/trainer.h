// Trainer holds a Gpt, its engine, and their place in the data.
#ifndef EXAMPLES_GPT_TRAINER_H_
#define EXAMPLES_GPT_TRAINER_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "ATen/core/Tensor.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "examples/gpt/flags.h"
#include "examples/gpt/gpt.h"
#include "examples/text/token_loader.h"
#include "tessera/tessera.h"

class Trainer {
 public:
  // Opens the data, makes the model and shards it. An error on one rank is
  // returned on all. COLLECTIVE.
  static absl::StatusOr<std::unique_ptr<Trainer>> Create(
      const TrainFlags& flags, const tessera::StartedJob& job);

  // Trains one optimizer step: one micro-batch per accumulation step, each of
  // this rank's own samples. Returns the mean loss over all of them and all
  // ranks, bitwise identical everywhere. COLLECTIVE. REQUIRES: flags.data was
  // given.
  absl::StatusOr<float> Step();

  // Returns the mean loss of the held-out samples, each on one rank and one
  // thread, so the bits are the same on all ranks, however many there are.
  // COLLECTIVE.
  absl::StatusOr<float> HeldOutLoss();

  // Returns what the model writes after flags.prompt
  // (examples/text/generate.h), or after a line's end if that is empty. Dropout
  // is off meanwhile. COLLECTIVE.
  std::string Sample();

  // Saves the sharded state, with this rank's place in the data. COLLECTIVE.
  absl::Status Save(const std::string& dir);
  // Waits for the last save and returns its result, if it was written beside
  // the training (checkpoint.async). LOCAL, blocking.
  absl::Status FinishSave() { return engine_->WaitForCheckpoint(); }
  // Resumes where Save was called: model, optimizer, random numbers and data.
  // Returns FailedPrecondition if the heads or the data differ. COLLECTIVE.
  absl::Status Resume(const std::string& dir);

  // Ends the training. COLLECTIVE.
  absl::Status Close() { return engine_->Close(); }

  tessera::Engine& engine() const { return *engine_; }
  // Returns the tokens of all ranks together in one step.
  int64_t tokens_per_step() const;
  // Returns two lines: sizes of the model; stage, ranks, threads, size of a
  // step.
  std::string Describe() const;

 private:
  Trainer(const TrainFlags& flags, const tessera::StartedJob& job)
      : flags_(flags), world_(*job.world), config_(job.config) {}
  absl::Status PrepareData();
  absl::Status MakeModel();
  at::Tensor Loss(const at::Tensor& tokens, const at::Tensor& targets);
  std::string Agreed() const;  // identical on all ranks

  const TrainFlags flags_;
  const tessera::World& world_;
  tessera::proto::Config config_;  // resolved
  std::optional<TokenText> text_;
  at::Device device_ = at::kCPU;
  int64_t parameter_count_ = 0;
  Gpt model_{nullptr};
  std::unique_ptr<tessera::Engine> engine_;
  std::unique_ptr<tessera::DataLoader> loader_;  // null without data
};

#endif  // EXAMPLES_GPT_TRAINER_H_
