#include "examples/resnet_cifar/batches.h"

#include <utility>

#include "base/status.h"
#include "data/distributed_order.h"
#include "data/images/cifar.h"
#include "data/images/made_images.h"
#include "examples/resnet_cifar/augment.h"

namespace {

// Crops a sample: the crop in an epoch is the same whichever rank and thread
// makes it, also in a resumed run.
void RandomImage(absl::Span<const uint8_t> image, tessera::SampleRandom* random,
                 float* out) {
  Crop crop;
  crop.top = random->Below(2 * kFrame + 1);
  crop.left = random->Below(2 * kFrame + 1);
  crop.mirrored = random->Below(2) == 1;
  CropAndNormalize(image, crop, out);
}

}  // namespace

absl::StatusOr<ImageSets> OpenCifar(const std::string& folder, int64_t images,
                                    uint64_t seed) {
  return OpenOrMake(
      folder,
      [&](const std::string& made) {
        return tessera::MakeCifar10(made, images, seed);
      },
      tessera::OpenCifar10);
}

void WholeImage(absl::Span<const uint8_t> image, tessera::SampleRandom*,
                float* out) {
  CropAndNormalize(image, Crop(), out);
}

absl::StatusOr<std::unique_ptr<tessera::DataLoader>> LoadBatches(
    const tessera::ImageSet& images, const tessera::World& world,
    const BatchOptions& options) {
  tessera::DistributedSamplerOptions order_options;
  order_options.num_samples = images.num_images();
  order_options.rank = world.rank();
  order_options.world_size = world.world_size();
  order_options.seed = options.seed;
  TESSERA_ASSIGN_OR_RETURN(auto order,
                           tessera::DistributedOrder::Create(order_options));
  tessera::DataLoaderOptions loader_options;
  loader_options.batch_size = options.batch_size;
  loader_options.epoch_end = tessera::EpochEnd::kShort;
  loader_options.seed = options.seed;
  loader_options.workers = options.workers;
  loader_options.device = world.device();
  return tessera::DataLoader::Create(
      std::move(order),
      FetchImages(&images, options.augment ? RandomImage : WholeImage),
      loader_options);
}

int64_t StepsPerEpoch(int64_t images, int64_t ranks, int64_t batch) {
  const int64_t of_rank = (images + ranks - 1) / ranks;
  return (of_rank + batch - 1) / batch;
}
