#include "examples/resnet_cifar/resnet.h"

#include <cstdint>
#include <memory>
#include <vector>

#include "data/distributed_order.h"
#include "examples/resnet_cifar/augment.h"
#include "examples/resnet_cifar/batches.h"
#include "gmock/gmock.h"
#include "loader/data_loader.h"
#include "torch/torch.h"

namespace {

using ::testing::Each;

// The sizes are those of torchvision's ResNet-18 with this stem and 10 classes.
TEST(ResNet18Test, HasTheSizesOfThePaper) {
  ResNet18 model;
  int64_t parameters = 0, convolutions = 0;
  for (const at::Tensor& p : model->parameters()) {
    parameters += p.numel();
    convolutions += p.dim() == 4 && p.size(2) == 3;
  }
  EXPECT_EQ(parameters, 11173962);
  EXPECT_EQ(convolutions, 17);  // and the linear layer: 18
  EXPECT_EQ(model->buffers().size(), 3u * 20);
}

TEST(ResNet18Test, WidthAndClassesAreOptions) {
  ResNet18 model(ResNetOptions().width(4).classes(7));
  EXPECT_EQ(model->forward(at::rand({2, 3, 32, 32})).sizes(),
            (std::vector<int64_t>{2, 7}));
}

// 50,000 images at a global batch of 768: 65 full steps, and one of the rest.
TEST(StepsTest, AnEpochOfCifarHas66) {
  for (const int64_t ranks : {1, 2, 3, 4, 6, 8}) {
    EXPECT_EQ(StepsPerEpoch(50000, ranks, 768 / ranks), 66) << ranks;
  }
  EXPECT_EQ(StepsPerEpoch(768, 3, 256), 1);
  EXPECT_EQ(StepsPerEpoch(769, 3, 256), 2);
}

// The loader has as many, of rank 2 of 3: 16,667 samples (the set is padded to
// 50,001), so the last batch has 27.
TEST(StepsTest, TheLoaderMakesAsMany) {
  tessera::DistributedSamplerOptions of;
  of.num_samples = 50000;
  of.rank = 2;
  of.world_size = 3;
  auto order = tessera::DistributedOrder::Create(of);
  ASSERT_TRUE(order.ok()) << order.status();
  tessera::DataLoaderOptions options;
  options.batch_size = 256;
  options.epoch_end = tessera::EpochEnd::kShort;
  auto loader = tessera::DataLoader::Create(
      *std::move(order),
      [](absl::Span<const int64_t> samples, const tessera::BatchContext&) {
        return std::vector<at::Tensor>{
            at::empty({static_cast<int64_t>(samples.size())})};
      },
      options);
  ASSERT_TRUE(loader.ok()) << loader.status();
  std::vector<int64_t> sizes;
  for (bool ends = false; !ends;) {
    const absl::StatusOr<tessera::Batch> batch = (*loader)->Next();
    ASSERT_TRUE(batch.ok()) << batch.status();
    sizes.push_back(batch->tensors[0].size(0));
    ends = batch->ends_epoch;
  }
  ASSERT_EQ(sizes.size(), 66u);
  EXPECT_EQ(sizes.back(), 27);
  sizes.pop_back();
  EXPECT_THAT(sizes, Each(256));
  EXPECT_EQ((*loader)->epoch(), 1);
}

at::Tensor Cropped(const at::Tensor& image, const Crop& crop) {
  at::Tensor out = at::empty({3, 32, 32});
  CropAndNormalize({image.data_ptr<uint8_t>(), kCifarPixels}, crop,
                   out.data_ptr<float>());
  return out;
}

TEST(AugmentTest, CropsAFrameAndMirrors) {
  const at::Tensor image =
      at::randint(256, {3, 32, 32}, at::TensorOptions(at::kByte));
  const at::Tensor mean = torch::tensor({0.4914, 0.4822, 0.4465});
  const at::Tensor deviation = torch::tensor({0.2470, 0.2435, 0.2616});
  const at::Tensor framed = at::constant_pad_nd(image, {4, 4, 4, 4});
  for (const int64_t top : {0, 4, 8}) {
    for (const int64_t left : {0, 3, 8}) {
      at::Tensor expected =
          framed.slice(1, top, top + 32).slice(2, left, left + 32);
      for (const bool mirrored : {false, true}) {
        if (mirrored) expected = expected.flip(2);
        EXPECT_TRUE(Cropped(image, {top, left, mirrored})
                        .equal((expected.to(at::kFloat) / 255 -
                                mean.to(at::kFloat).view({3, 1, 1})) /
                               deviation.to(at::kFloat).view({3, 1, 1})))
            << top << " " << left << " " << mirrored;
      }
    }
  }
  EXPECT_TRUE(Cropped(image, Crop()).equal(Cropped(image, {4, 4, false})));
}

}  // namespace
