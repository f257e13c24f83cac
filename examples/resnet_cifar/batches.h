// Makes batches of CIFAR-10 for training and for tests.
#ifndef EXAMPLES_RESNET_CIFAR_BATCHES_H_
#define EXAMPLES_RESNET_CIFAR_BATCHES_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "comm/world/world.h"
#include "data/images/image_set.h"
#include "examples/vision/images.h"
#include "loader/data_loader.h"
#include "loader/sample_random.h"

// Opens CIFAR-10's binary version in `folder`; "": `images` are made. LOCAL.
// Errors are those of OpenOrMake.
absl::StatusOr<ImageSets> OpenCifar(const std::string& folder, int64_t images,
                                    uint64_t seed);

struct BatchOptions {
  int64_t batch_size = 1;  // of this rank
  bool augment = true;     // random crops and mirrored images
  int workers = 0;         // threads that make batches
  uint64_t seed = 1;       // of the order and the crops
};

// Returns the batches of this rank, whose last one in an epoch may be smaller.
// `images` outlives them. LOCAL. Errors are those of DataLoader::Create.
absl::StatusOr<std::unique_ptr<tessera::DataLoader>> LoadBatches(
    const tessera::ImageSet& images, const tessera::World& world,
    const BatchOptions& options);

// Converts a whole image, as tests see it, to floats at `out`.
void WholeImage(absl::Span<const uint8_t> image, tessera::SampleRandom*,
                float* out);

// Returns the steps of an epoch: each rank has equally many samples, padded,
// and the last batch may be smaller.
int64_t StepsPerEpoch(int64_t images, int64_t ranks, int64_t batch);

#endif  // EXAMPLES_RESNET_CIFAR_BATCHES_H_
