// Images from files, or made where there are none, and batches of them.
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
#include "data/images/image_set.h"
#include "loader/batch.h"
#include "loader/sample_random.h"

struct ImageSets {
  tessera::ImageSet train, test;
};

// Of `folder`; of a folder of this process's own, gone afterwards, that `make`
// has filled, if that is "". LOCAL; errors of `make`, `open` and the disk.
absl::StatusOr<ImageSets> OpenOrMake(
    const std::string& folder,
    const std::function<absl::Status(const std::string& folder)>& make,
    const std::function<absl::StatusOr<tessera::ImageSet>(
        const std::string& folder, tessera::ImageSplit split)>& open);

// The bytes of an image to as many floats. `random`: of the sample, where it is
// trained on; null where it is not.
using ConvertImage =
    std::function<void(absl::Span<const uint8_t> image,
                       tessera::SampleRandom* random, float* out)>;

// Images [B, C, H, W] of floats, labels [B] of int64. `set` outlives the
// result.
tessera::Fetch FetchImages(const tessera::ImageSet* set, ConvertImage convert);

// The same of some samples, without randomness. On the CPU.
std::pair<at::Tensor, at::Tensor> ImagesOf(const tessera::ImageSet& set,
                                           absl::Span<const int64_t> samples,
                                           const ConvertImage& convert);

#endif  // EXAMPLES_VISION_IMAGES_H_
