#include "examples/resnet_cifar/augment.h"

namespace {

// These are of the 50,000 training images, in fractions of 255.
constexpr float kMean[kCifarChannels] = {0.4914f, 0.4822f, 0.4465f};
constexpr float kDeviation[kCifarChannels] = {0.2470f, 0.2435f, 0.2616f};

}  // namespace

void CropAndNormalize(absl::Span<const uint8_t> image, const Crop& crop,
                      float* out) {
  for (int64_t channel = 0; channel < kCifarChannels; ++channel) {
    const uint8_t* const plane =
        image.data() + channel * kCifarSide * kCifarSide;
    for (int64_t row = 0; row < kCifarSide; ++row) {
      const int64_t y = row + crop.top - kFrame;
      for (int64_t column = 0; column < kCifarSide; ++column) {
        const int64_t x = (crop.mirrored ? kCifarSide - 1 - column : column) +
                          crop.left - kFrame;
        const bool inside =
            y >= 0 && y < kCifarSide && x >= 0 && x < kCifarSide;
        const float value =
            inside ? static_cast<float>(plane[y * kCifarSide + x]) / 255 : 0;
        *out++ = (value - kMean[channel]) / kDeviation[channel];
      }
    }
  }
}
