#include "data/images/cifar.h"

#include <string>

#include "absl/strings/str_cat.h"
#include "base/status_matchers.h"
#include "data/test_files.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tessera {
namespace {

using ::absl::StatusCode;
using ::testing::Each;
using ::testing::HasSubstr;
using ::testing::SizeIs;
using ::testing::StartsWith;

// A record whose image is `value` throughout.
std::string Record(const std::string& labels, int value) {
  return labels + std::string(3072, static_cast<char>(value));
}

std::string Byte(int value) { return std::string(1, static_cast<char>(value)); }

// Five files of which the i-th has i records, all of class i, all i * 10 + j.
std::string WriteCifar10() {
  const std::string folder = TestFolder("d");
  for (int i = 1; i <= 5; ++i) {
    std::string content;
    for (int j = 0; j < i; ++j) content += Record(Byte(i), i * 10 + j);
    WriteBytes(absl::StrCat(folder, "/data_batch_", i, ".bin"), content);
  }
  WriteBytes(folder + "/test_batch.bin", Record(Byte(9), 255));
  return folder;
}

TEST(Cifar10, ReadsAllFiles) {
  const std::string folder = WriteCifar10();
  TESSERA_ASSERT_OK_AND_ASSIGN(const ImageSet train,
                               OpenCifar10(folder, ImageSplit::kTrain));
  ASSERT_EQ(train.num_images(), 15);
  EXPECT_EQ(train.num_classes(), 10);
  EXPECT_EQ(train.channels(), 3);
  EXPECT_EQ(train.height(), 32);
  EXPECT_EQ(train.width(), 32);
  int64_t index = 0;
  for (int i = 1; i <= 5; ++i) {
    for (int j = 0; j < i; ++j, ++index) {
      EXPECT_EQ(train.label(index), i);
      EXPECT_THAT(train.image(index), SizeIs(3072));
      EXPECT_THAT(train.image(index), Each(i * 10 + j));
    }
  }
  EXPECT_DEATH(train.image(15), "15 vs 15");
  EXPECT_DEATH(train.label(-1), "-1 vs 0");
  TESSERA_ASSERT_OK_AND_ASSIGN(const ImageSet test,
                               OpenCifar10(folder, ImageSplit::kTest));
  ASSERT_EQ(test.num_images(), 1);
  EXPECT_EQ(test.label(0), 9);
}

// Red, green and blue planes, as they lie in the file.
TEST(Cifar10, ImagesArePlanes) {
  const std::string folder = WriteCifar10();
  WriteBytes(folder + "/test_batch.bin", Byte(1) + std::string(1024, 'r') +
                                             std::string(1024, 'g') +
                                             std::string(1024, 'b'));
  TESSERA_ASSERT_OK_AND_ASSIGN(const ImageSet test,
                               OpenCifar10(folder, ImageSplit::kTest));
  EXPECT_THAT(test.image(0).subspan(0, 1024), Each('r'));
  EXPECT_THAT(test.image(0).subspan(1024, 1024), Each('g'));
  EXPECT_THAT(test.image(0).subspan(2048), Each('b'));
}

TEST(Cifar100, HasTwoLabels) {
  const std::string folder = TestFolder("d");
  WriteBytes(folder + "/train.bin", Record(Byte(19) + Byte(99), 5));
  WriteBytes(folder + "/test.bin", Record(Byte(3) + Byte(98), 6));
  TESSERA_ASSERT_OK_AND_ASSIGN(const ImageSet fine,
                               OpenCifar100(folder, ImageSplit::kTrain));
  EXPECT_EQ(fine.num_classes(), 100);
  EXPECT_EQ(fine.label(0), 99);
  EXPECT_THAT(fine.image(0), Each(5));
  TESSERA_ASSERT_OK_AND_ASSIGN(
      const ImageSet coarse,
      OpenCifar100(folder, ImageSplit::kTest, Cifar100Labels::kCoarse));
  EXPECT_EQ(coarse.num_classes(), 20);
  EXPECT_EQ(coarse.label(0), 3);
  EXPECT_THAT(coarse.image(0), Each(6));
}

TEST(Cifar10, BadFilesAreRefusedByFileAndByte) {
  const std::string folder = WriteCifar10();
  const std::string third = folder + "/data_batch_3.bin";
  const std::string whole = ReadBytes(third);
  WriteBytes(third, whole.substr(0, whole.size() - 1));
  EXPECT_THAT(
      OpenCifar10(folder, ImageSplit::kTrain),
      StatusIs(StatusCode::kDataLoss,
               third + ": byte 6146: expected records of 3073 bytes, the file "
                       "ends after 3072 bytes of the last one"));
  std::string label = whole;
  label[3073] = 10;
  WriteBytes(third, label);
  EXPECT_THAT(OpenCifar10(folder, ImageSplit::kTrain),
              StatusIs(StatusCode::kDataLoss,
                       third + ": byte 3073: the label of image 1 is 10, "
                               "expected 0 to 9"));
  remove(third.c_str());
  EXPECT_THAT(OpenCifar10(folder, ImageSplit::kTrain),
              StatusIs(StatusCode::kNotFound, StartsWith(third)));
  WriteBytes(third, "");
  EXPECT_THAT(OpenCifar10(folder, ImageSplit::kTrain),
              StatusIs(StatusCode::kInvalidArgument, HasSubstr("has 0")));
}

TEST(Cifar100, TheLabelThatIsUsedIsChecked) {
  const std::string folder = TestFolder("d");
  WriteBytes(folder + "/train.bin",
             Record(Byte(20) + Byte(99), 5) + Record(Byte(1) + Byte(100), 5));
  EXPECT_THAT(OpenCifar100(folder, ImageSplit::kTrain),
              StatusIs(StatusCode::kDataLoss,
                       HasSubstr("byte 3075: the label of image 1 is 100")));
  EXPECT_THAT(OpenCifar100(folder, ImageSplit::kTrain, Cifar100Labels::kCoarse),
              StatusIs(StatusCode::kDataLoss,
                       HasSubstr("byte 0: the label of image 0 is 20")));
}

}  // namespace
}  // namespace tessera
