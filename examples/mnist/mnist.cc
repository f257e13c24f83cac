// Trains a small convolutional network on MNIST (or a set in its format), and
// prints its accuracy on the test set.
//
//   bazel run //examples/mnist -- --world=2 --data FOLDER --steps 2000
//
// FOLDER has MNIST's four files (train-images-idx3-ubyte, ...), plain or .gz.
// Without it images are synthetic.
#include <cstdio>
#include <memory>
#include <string>
#include <utility>

#include "absl/flags/flag.h"
#include "examples/vision/images.h"
#include "examples/vision/score.h"
#include "examples/vision/torch_arguments.h"
#include "tessera/extra.h"
#include "tessera/tessera.h"
#include "torch/torch.h"

ABSL_FLAG(std::string, data, "",
          "Folder of MNIST's files; by default images are synthetic.");
ABSL_FLAG(int64_t, images, 2000, "Number of synthetic images.");
ABSL_FLAG(int64_t, steps, 200, "Optimizer steps, over any number of epochs.");
ABSL_FLAG(std::string, save, "", "Folder for a checkpoint at the end.");
ABSL_FLAG(std::string, resume, "", "Folder that --save wrote.");

namespace nn = torch::nn;

namespace {

nn::Sequential MakeModel() {
  const auto conv = [](int64_t in, int64_t out) {
    return nn::Conv2d(nn::Conv2dOptions(in, out, 3).padding(1));
  };
  return nn::Sequential(conv(1, 16), nn::ReLU(), nn::MaxPool2d(2), conv(16, 32),
                        nn::ReLU(), nn::MaxPool2d(2), nn::Flatten(),
                        nn::Linear(32 * 7 * 7, 64), nn::ReLU(),
                        nn::Linear(64, 10));
}

// Normalizes such that MNIST's training set has mean 0 and standard deviation
// 1.
void Normalize(absl::Span<const uint8_t> image, tessera::SampleRandom*,
               float* out) {
  for (const uint8_t pixel : image) {
    *out++ = (static_cast<float>(pixel) / 255 - 0.1307f) / 0.3081f;
  }
}

absl::StatusOr<ImageSets> OpenData() {
  return OpenOrMake(
      absl::GetFlag(FLAGS_data),
      [](const std::string& folder) {
        return tessera::MakeMnist(folder, absl::GetFlag(FLAGS_images), 1);
      },
      [](const std::string& folder, tessera::ImageSplit split) {
        return tessera::OpenMnist(folder, split);
      });
}

absl::StatusOr<std::unique_ptr<tessera::DataLoader>> MakeLoader(
    const tessera::ImageSet& images, const tessera::World& world,
    int64_t batch) {
  tessera::DistributedSamplerOptions order_options;
  order_options.num_samples = images.num_images();
  order_options.rank = world.rank();
  order_options.world_size = world.world_size();
  TESSERA_ASSIGN_OR_RETURN(auto order,
                           tessera::DistributedOrder::Create(order_options));
  tessera::DataLoaderOptions options;
  options.batch_size = batch;
  options.workers = 1;
  options.device = world.device();
  return tessera::DataLoader::Create(std::move(order),
                                     FetchImages(&images, Normalize), options);
}

absl::Status Train(tessera::Engine& engine, nn::Sequential& model,
                   tessera::DataLoader& loader, tessera::Communicator& comm) {
  const int64_t steps = absl::GetFlag(FLAGS_steps);
  tessera::Progress progress(&engine, {.steps = steps});
  while (engine.step() < steps) {
    TESSERA_ASSIGN_OR_RETURN(const tessera::Batch batch,
                             loader.NextOnAll(comm));
    const at::Tensor logits = model->forward(batch.tensors[0]);
    const at::Tensor loss =
        nn::functional::cross_entropy(logits.to(at::kFloat), batch.tensors[1]);
    TESSERA_RETURN_IF_ERROR(engine.Backward(loss));
    TESSERA_RETURN_IF_ERROR(engine.Step());
    TESSERA_RETURN_IF_ERROR(progress.Show(loss));
  }
  return absl::OkStatus();
}

absl::Status Run(int argc, char** argv) {
  TorchArguments arguments(argc, argv);
  TESSERA_ASSIGN_OR_RETURN(
      const auto job, tessera::Start(&arguments.argc, arguments.argv,
                                     {.about = "trains a network on MNIST",
                                      .config = "examples/mnist/adamw.json"}));
  const tessera::World& world = *job.world;
  // An error on one rank is shared with all, so that none waits for it.
  absl::StatusOr<ImageSets> data = OpenData();
  TESSERA_RETURN_IF_ERROR(job.comm().AgreeOk(data.status(), "data"));

  tessera::SeedAll(1, world);
  nn::Sequential model = MakeModel();
  tessera::EngineOptions options;
  options.device = world.device();
  TESSERA_ASSIGN_OR_RETURN(auto engine,
                           tessera::Engine::Create(model, job.config, options));
  const int64_t batch_size = engine->config().train_micro_batch_size_per_gpu();
  TESSERA_ASSIGN_OR_RETURN(auto loader,
                           MakeLoader(data->train, world, batch_size));
  if (const std::string dir = absl::GetFlag(FLAGS_resume); !dir.empty()) {
    TESSERA_ASSIGN_OR_RETURN(auto report, engine->LoadCheckpoint(dir));
    TESSERA_RETURN_IF_ERROR(job.comm().AgreeOk(
        loader->Load(report.client_state), "the place in the data"));
  }

  TESSERA_RETURN_IF_ERROR(Train(*engine, model, *loader, job.comm()));
  if (const std::string dir = absl::GetFlag(FLAGS_save); !dir.empty()) {
    TESSERA_RETURN_IF_ERROR(engine->SaveCheckpoint(dir, loader->State()));
  }

  Score test;
  tessera::EvaluateOptions evaluation;
  evaluation.batch_size = batch_size;
  TESSERA_RETURN_IF_ERROR(tessera::Evaluate(
      engine.get(), test.metrics(), data->test.num_images(),
      [&](absl::Span<const int64_t> samples) {
        const auto [images, labels] = ImagesOf(data->test, samples, Normalize);
        test.Add(model->forward(images.to(world.device())),
                 labels.to(world.device()));
        return absl::OkStatus();
      },
      evaluation));
  if (world.rank() == 0) {
    std::printf("test set: %.2f %% of %.0f images, loss %.6g\n",
                100 * test.accuracy.value(), test.accuracy.weight(),
                test.loss.value());
  }
  return engine->Close();
}

}  // namespace

TESSERA_MAIN(Run)
