#include "data/images/made_images.h"

#include <limits>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/bits.h"
#include "base/status_matchers.h"
#include "data/images/cifar.h"
#include "data/images/mnist.h"
#include "data/test_files.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tessera {
namespace {

using ::absl::StatusCode;
using ::testing::HasSubstr;

// The part of `test` whose nearest mean of a class of `train` is its own.
double NearestMean(const ImageSet& train, const ImageSet& test) {
  const auto bytes = static_cast<size_t>(train.shape().image_bytes());
  std::vector<std::vector<double>> means(10, std::vector<double>(bytes));
  std::vector<double> counts(10);
  for (int64_t i = 0; i < train.num_images(); ++i) {
    const auto label = static_cast<size_t>(train.label(i));
    ++counts[label];
    for (size_t j = 0; j < bytes; ++j) means[label][j] += train.image(i)[j];
  }
  int64_t right = 0;
  for (int64_t i = 0; i < test.num_images(); ++i) {
    size_t best = 0;
    double least = std::numeric_limits<double>::max();
    for (size_t c = 0; c < means.size(); ++c) {
      double distance = 0;
      for (size_t j = 0; j < bytes; ++j) {
        const double difference = means[c][j] / counts[c] - test.image(i)[j];
        distance += difference * difference;
      }
      if (distance < least) {
        least = distance;
        best = c;
      }
    }
    right += static_cast<int64_t>(best) == test.label(i);
  }
  return static_cast<double>(right) / static_cast<double>(test.num_images());
}

TEST(MakeCifar10, ClassesCanBeLearnt) {
  const std::string folder = TestPath("d");
  TESSERA_ASSERT_OK(MakeCifar10(folder, 203, 1));
  TESSERA_ASSERT_OK_AND_ASSIGN(const ImageSet train,
                               OpenCifar10(folder, ImageSplit::kTrain));
  TESSERA_ASSERT_OK_AND_ASSIGN(const ImageSet test,
                               OpenCifar10(folder, ImageSplit::kTest));
  EXPECT_EQ(train.num_images(), 203);
  EXPECT_EQ(test.num_images(), 40);
  for (int64_t i = 0; i < 203; ++i) ASSERT_EQ(train.label(i), i % 10);
  EXPECT_GE(NearestMean(train, test), 0.9);  // of the numbers of this seed
  EXPECT_NE(train.image(0), test.image(0));
  EXPECT_NE(train.image(0), train.image(10));
}

TEST(MakeMnist, ClassesCanBeLearnt) {
  const std::string folder = TestPath("d");
  TESSERA_ASSERT_OK(MakeMnist(folder, 200, 1));
  TESSERA_ASSERT_OK_AND_ASSIGN(const ImageSet train,
                               OpenMnist(folder, ImageSplit::kTrain));
  TESSERA_ASSERT_OK_AND_ASSIGN(const ImageSet test,
                               OpenMnist(folder, ImageSplit::kTest));
  EXPECT_EQ(train.num_images(), 200);
  EXPECT_EQ(train.height(), 28);
  EXPECT_EQ(train.width(), 28);
  EXPECT_EQ(test.num_images(), 40);
  EXPECT_GE(NearestMean(train, test), 0.9);
}

// A change of these values changes the curves of all examples.
TEST(MadeImages, BitsDependOnNumberAndSeedAlone) {
  const auto fingerprint = [](const std::string& path) {
    const std::string bytes = ReadBytes(path);
    return Fingerprint(bytes.data(), static_cast<int64_t>(bytes.size()));
  };
  const std::string a = TestPath("a"), b = TestPath("b");
  TESSERA_ASSERT_OK(MakeCifar10(a, 20, 7));
  TESSERA_ASSERT_OK(MakeCifar10(b, 20, 8));
  EXPECT_NE(fingerprint(a + "/data_batch_2.bin"),
            fingerprint(b + "/data_batch_2.bin"));
  TESSERA_ASSERT_OK(MakeCifar10(b, 20, 7));
  for (const char* name : {"/data_batch_1.bin", "/test_batch.bin"}) {
    EXPECT_EQ(fingerprint(a + name), fingerprint(b + name));
  }
  TESSERA_ASSERT_OK(MakeMnist(a, 20, 7));
  EXPECT_EQ(fingerprint(a + "/data_batch_2.bin"), 4708195916379378058u);
  EXPECT_EQ(fingerprint(a + "/train-images-idx3-ubyte"), 7607380852258334894u);
}

TEST(MadeImages, WhatCannotBeIsRefused) {
  EXPECT_THAT(MakeCifar10(TestPath("d"), 4, 0),
              StatusIs(StatusCode::kInvalidArgument,
                       HasSubstr("expected 5 to 10000000 images, got 4")));
  EXPECT_THAT(MakeMnist(TestPath("d"), 0, 0),
              StatusIs(StatusCode::kInvalidArgument, HasSubstr("got 0")));
  EXPECT_THAT(MakeMnist("/nowhere/d", 1, 0), StatusIs(StatusCode::kNotFound));
  const std::string file = WriteTestFile("f", "x");
  EXPECT_FALSE(MakeCifar10(file, 5, 0).ok());
}

}  // namespace
}  // namespace tessera
