// Opens images from files, or makes synthetic ones, and batches them.
#ifndef EXAMPLES_VISION_IMAGES_H_
#define EXAMPLES_VISION_IMAGES_H_

#include <cstdint>
#include <functional>
#include <string>
#include <utility>

#include "ATen/core/Tensor.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "tessera/extra.h"
#include "tessera/tessera.h"

struct ImageSets {
  tessera::ImageSet train, test;
};

// Opens the images in `folder`. If that is "", `make` fills a temporary folder
// of this process, which is removed afterwards. LOCAL; errors are those of
// `make`, `open` and the disk.
absl::StatusOr<ImageSets> OpenOrMake(
    const std::string& folder,
    const std::function<absl::Status(const std::string& folder)>& make,
    const std::function<absl::StatusOr<tessera::ImageSet>(
        const std::string& folder, tessera::ImageSplit split)>& open);

// Converts the bytes of an image to as many floats. `random` is that of the
// sample in training, null otherwise.
using ConvertImage =
    std::function<void(absl::Span<const uint8_t> image,
                       tessera::SampleRandom* random, float* out)>;

// Returns a Fetch of images [B, C, H, W] of floats and labels [B] of int64.
// `set` outlives the result.
tessera::Fetch FetchImages(const tessera::ImageSet* set, ConvertImage convert);

// Returns images and labels of some samples, without randomness, on the CPU.
std::pair<at::Tensor, at::Tensor> ImagesOf(const tessera::ImageSet& set,
                                           absl::Span<const int64_t> samples,
                                           const ConvertImage& convert);

#endif  // EXAMPLES_VISION_IMAGES_H_
