// Prepares an image of CIFAR for training: a random crop of the image in a
// frame of 4 black pixels, mirrored half of the time, and normalized.
//
// Source: He et al., 2015, section 4.2; torchvision's RandomCrop(32, padding=4)
// and RandomHorizontalFlip.
#ifndef EXAMPLES_RESNET_CIFAR_AUGMENT_H_
#define EXAMPLES_RESNET_CIFAR_AUGMENT_H_

#include <cstdint>

#include "absl/types/span.h"

inline constexpr int64_t kCifarSide = 32;
inline constexpr int64_t kCifarChannels = 3;
inline constexpr int64_t kCifarPixels =
    kCifarChannels * kCifarSide * kCifarSide;
inline constexpr int64_t kFrame = 4;

// Crop is where the crop begins in the framed image, 0 to 2 * kFrame, and
// whether it is mirrored. kFrame, kFrame, false gives the image itself.
struct Crop {
  int64_t top = kFrame, left = kFrame;
  bool mirrored = false;
};

// Converts `image`, [3, 32, 32] bytes, to as many floats in `out`, such that
// over CIFAR-10 each channel has mean 0 and standard deviation 1. The frame is
// black before that, as torchvision's is.
void CropAndNormalize(absl::Span<const uint8_t> image, const Crop& crop,
                      float* out);

#endif  // EXAMPLES_RESNET_CIFAR_AUGMENT_H_
