// Trains ResNet-18 on CIFAR-10, as PyTorch's scripts do with
// DistributedDataParallel.
//
//   bazel run //examples/resnet_cifar:train -- --world=2 --data FOLDER
//   train --dist-url tcp://node1:29500 --world-size 6 --rank 3 --data FOLDER
//
// trainer.cc has all that uses Tessera.
#include <string>

#include "absl/flags/flag.h"
#include "examples/resnet_cifar/trainer.h"
#include "examples/vision/torch_arguments.h"
#include "tessera/tessera.h"

ABSL_FLAG(std::string, data, "",
          "Folder of CIFAR-10's binary version; by default images are "
          "synthetic.");
ABSL_FLAG(int64_t, images, TrainFlags().images, "Number of synthetic images.");
ABSL_FLAG(int64_t, epochs, TrainFlags().epochs, "Number of epochs.");
ABSL_FLAG(int64_t, max_steps, 0,
          "Save and end after this many steps; 0: no limit.");
ABSL_FLAG(int64_t, width, TrainFlags().width, "Channels after the stem.");
ABSL_FLAG(bool, augment, true, "Random crops and mirrored images.");
ABSL_FLAG(int32_t, workers, TrainFlags().workers,
          "Data loader threads per rank.");
ABSL_FLAG(uint64_t, seed, TrainFlags().seed,
          "Seed of initial values, data order and crops.");
ABSL_FLAG(std::string, save, "", "Folder for checkpoints.");
ABSL_FLAG(double, save_minutes, TrainFlags().save_minutes,
          "Minutes between checkpoints; one is also saved at the end and on "
          "SIGTERM.");
ABSL_FLAG(bool, resume, false,
          "Continue from the newest checkpoint in --save.");

namespace {

absl::StatusOr<TrainFlags> Flags() {
  TrainFlags flags;
  flags.data = absl::GetFlag(FLAGS_data);
  flags.images = absl::GetFlag(FLAGS_images);
  flags.epochs = absl::GetFlag(FLAGS_epochs);
  flags.max_steps = absl::GetFlag(FLAGS_max_steps);
  flags.width = absl::GetFlag(FLAGS_width);
  flags.augment = absl::GetFlag(FLAGS_augment);
  flags.workers = absl::GetFlag(FLAGS_workers);
  flags.seed = absl::GetFlag(FLAGS_seed);
  flags.save = absl::GetFlag(FLAGS_save);
  flags.save_minutes = absl::GetFlag(FLAGS_save_minutes);
  flags.resume = absl::GetFlag(FLAGS_resume);
  if (flags.epochs < 1 || flags.width < 1 || flags.images < 10) {
    return absl::InvalidArgumentError(
        "expected --epochs and --width of at least 1, --images of at least 10");
  }
  if (flags.resume && flags.save.empty()) {
    return absl::InvalidArgumentError("--resume: from where? give --save");
  }
  return flags;
}

absl::Status Run(int argc, char** argv) {
  TorchArguments arguments(argc, argv);
  TrainFlags flags;
  tessera::StartOptions options;
  options.about = "trains ResNet-18 on CIFAR-10";
  options.config = "examples/resnet_cifar/sgd.json";
  options.flags_read = [&](tessera::StartOptions*) -> absl::Status {
    TESSERA_ASSIGN_OR_RETURN(flags, Flags());
    return absl::OkStatus();
  };
  TESSERA_ASSIGN_OR_RETURN(
      const tessera::StartedJob job,
      tessera::Start(&arguments.argc, arguments.argv, options));
  TESSERA_ASSIGN_OR_RETURN(auto trainer, Trainer::Create(flags, job));
  return trainer->Train();
}

}  // namespace

TESSERA_MAIN(Run)
