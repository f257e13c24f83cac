// Trainer holds a ResNet-18, its engine, and its place in the data.
#ifndef EXAMPLES_RESNET_CIFAR_TRAINER_H_
#define EXAMPLES_RESNET_CIFAR_TRAINER_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "examples/resnet_cifar/resnet.h"
#include "examples/vision/images.h"
#include "examples/vision/score.h"
#include "tessera/tessera.h"

struct TrainFlags {
  std::string data;       // CIFAR-10's binary version; "": synthetic images
  int64_t images = 2000;  // number of synthetic images
  int64_t epochs = 200;
  int64_t max_steps = 0;  // ends there, and saves; 0: no such limit
  int64_t width = 64;
  bool augment = true;
  int workers = 2;  // threads of each rank that make batches
  uint64_t seed = 1;
  std::string save;  // the folder of checkpoints; "": none
  double save_minutes = 10;
  bool resume = false;
};

class Trainer {
 public:
  // COLLECTIVE: an error on one rank is returned on all.
  static absl::StatusOr<std::unique_ptr<Trainer>> Create(
      const TrainFlags& flags, const tessera::StartedJob& job);

  // Trains until the epochs end, or until a signal asks it to end. Rank 0
  // prints a line for each epoch. COLLECTIVE.
  absl::Status Train();

 private:
  Trainer(const TrainFlags& flags, const tessera::StartedJob& job)
      : flags_(flags),
        world_(*job.world),
        config_path_(job.config_path),
        config_(job.config) {}
  absl::Status Prepare();
  void PlanRate();
  absl::Status MakeEngine();
  absl::Status MakeManager();
  absl::Status Step();
  absl::Status EndEpoch();
  void SayEpoch(const Score& train, const Score& test);
  std::string ClientState() const;
  absl::Status LoadClientState(const std::string& state);

  const TrainFlags flags_;
  const tessera::World& world_;
  const std::string config_path_;
  tessera::proto::Config config_;
  std::optional<ImageSets> data_;
  std::unique_ptr<tessera::DataLoader> loader_;
  ResNet18 model_{nullptr};
  std::unique_ptr<tessera::Engine> engine_;
  std::unique_ptr<tessera::CheckpointManager> manager_;
  int64_t steps_ = 0;  // of all epochs
  std::optional<tessera::Progress> progress_;
  Score seen_;         // in this epoch's training
  int64_t epoch_ = 0;  // epochs that have ended
};

#endif  // EXAMPLES_RESNET_CIFAR_TRAINER_H_
