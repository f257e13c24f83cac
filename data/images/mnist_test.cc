#include "data/images/mnist.h"

#include <zlib.h>

#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status_matchers.h"
#include "data/test_files.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tessera {
namespace {

using ::absl::StatusCode;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::StartsWith;

std::string BigEndian(const std::vector<uint32_t>& numbers) {
  std::string bytes;
  for (const uint32_t number : numbers) {
    for (int shift = 24; shift >= 0; shift -= 8) {
      bytes += static_cast<char>(number >> shift & 0xFF);
    }
  }
  return bytes;
}

std::string Gzip(const std::string& bytes) {
  std::string packed(bytes.size() + 1000, '\0');
  z_stream stream = {};
  EXPECT_EQ(
      deflateInit2(&stream, 6, Z_DEFLATED, 15 + 16, 8, Z_DEFAULT_STRATEGY),
      Z_OK);
  stream.next_in = reinterpret_cast<Bytef*>(const_cast<char*>(bytes.data()));
  stream.avail_in = static_cast<uInt>(bytes.size());
  stream.next_out = reinterpret_cast<Bytef*>(packed.data());
  stream.avail_out = static_cast<uInt>(packed.size());
  EXPECT_EQ(deflate(&stream, Z_FINISH), Z_STREAM_END);
  packed.resize(stream.total_out);
  deflateEnd(&stream);
  return packed;
}

// Three images of 2 x 3.
class Mnist : public ::testing::Test {
 protected:
  void SetUp() override {
    folder_ = TestFolder("d");
    images_path_ = folder_ + "/train-images-idx3-ubyte";
    labels_path_ = folder_ + "/train-labels-idx1-ubyte";
    images_ = BigEndian({0x803, 3, 2, 3}) + "abcdefghijklmnopqr";
    labels_ = BigEndian({0x801, 3}) + std::string("\x00\x09\x04", 3);
    WriteBytes(images_path_, images_);
    WriteBytes(labels_path_, labels_);
  }

  absl::StatusOr<ImageSet> Open() const {
    return OpenMnist(folder_, ImageSplit::kTrain);
  }

  void ExpectImages() const {
    TESSERA_ASSERT_OK_AND_ASSIGN(const ImageSet set, Open());
    ASSERT_EQ(set.num_images(), 3);
    EXPECT_EQ(set.channels(), 1);
    EXPECT_EQ(set.height(), 2);
    EXPECT_EQ(set.width(), 3);
    EXPECT_THAT(set.image(1), ElementsAre('g', 'h', 'i', 'j', 'k', 'l'));
    EXPECT_EQ(set.label(0), 0);
    EXPECT_EQ(set.label(1), 9);
    EXPECT_EQ(set.label(2), 4);
  }

  std::string folder_, images_path_, labels_path_, images_, labels_;
};

TEST_F(Mnist, ReadsPlainFiles) { ExpectImages(); }

TEST_F(Mnist, ReadsPackedFiles) {
  remove(images_path_.c_str());
  WriteBytes(images_path_ + ".gz", Gzip(images_));
  ExpectImages();
  // Two members are one file.
  WriteBytes(images_path_ + ".gz",
             Gzip(images_.substr(0, 20)) + Gzip(images_.substr(20)));
  ExpectImages();
  remove(labels_path_.c_str());
  WriteBytes(labels_path_ + ".gz", Gzip(labels_));
  ExpectImages();
}

TEST_F(Mnist, TheTestSetHasItsOwnFiles) {
  EXPECT_THAT(OpenMnist(folder_, ImageSplit::kTest),
              StatusIs(StatusCode::kNotFound,
                       StartsWith(folder_ + "/t10k-images-idx3-ubyte")));
  WriteBytes(folder_ + "/t10k-images-idx3-ubyte",
             BigEndian({0x803, 1, 1, 1}) + "z");
  WriteBytes(folder_ + "/t10k-labels-idx1-ubyte", BigEndian({0x801, 1}) + "\2");
  TESSERA_ASSERT_OK_AND_ASSIGN(const ImageSet set,
                               OpenMnist(folder_, ImageSplit::kTest));
  EXPECT_EQ(set.num_images(), 1);
}

TEST_F(Mnist, MoreClassesMayBeAsked) {  // EMNIST
  labels_[9] = 46;
  WriteBytes(labels_path_, labels_);
  EXPECT_THAT(Open(), StatusIs(StatusCode::kDataLoss,
                               labels_path_ + ": byte 9: the label of image 1 "
                                              "is 46, expected 0 to 9"));
  TESSERA_EXPECT_OK(OpenMnist(folder_, ImageSplit::kTrain, 47));
}

TEST_F(Mnist, BadFilesAreRefusedByFileAndByte) {
  const std::pair<std::string, const char*> cases[] = {
      {BigEndian({0x803, 3}), "byte 8: the data ends in the header of 16"},
      {BigEndian({0x801, 3, 2, 3}), "byte 0: expected idx of bytes with 3 "},
      {BigEndian({0x803, 3, 2, 3}) + "short", "byte 21: the header says 18 "},
      {images_ + "x", "byte 35: the header says 18 bytes after it, there"},
      {BigEndian({0x803, 0, 2, 3}), "byte 4: size 0 is 0, which cannot be"},
      {BigEndian({0x803, 3, 0xFFFFFFFF, 3}), "byte 8: size 1 is 4294967295"},
      {BigEndian({0x803, 0xFFFFFFFF, 0xFFFFFFFF, 3}), "byte 8: size 1 is 42"},
  };
  for (const auto& [content, message] : cases) {
    WriteBytes(images_path_, content);
    EXPECT_THAT(Open(), StatusIs(StatusCode::kDataLoss,
                                 StartsWith(images_path_ + ": " + message)));
  }
  WriteBytes(images_path_, images_);
  WriteBytes(labels_path_, BigEndian({0x801, 2}) + "ab");
  EXPECT_THAT(Open(), StatusIs(StatusCode::kDataLoss,
                               labels_path_ + ": byte 4: 2 labels, but " +
                                   images_path_ + " has 3 images"));
}

TEST_F(Mnist, DamagedGzipIsRefusedByFileAndByte) {
  remove(images_path_.c_str());
  const std::string path = images_path_ + ".gz", whole = Gzip(images_);
  for (size_t length = 1; length < whole.size(); ++length) {
    WriteBytes(path, whole.substr(0, length));
    EXPECT_THAT(Open(), StatusIs(StatusCode::kDataLoss,
                                 absl::StrCat(path, ": byte ", length,
                                              ": the file is truncated")))
        << length;
  }
  // Some bits say nothing of the content (a time, a file's name, the rest of a
  // byte behind the last code): with others the images are never different.
  int refused = 0;
  for (size_t bit = 0; bit < 8 * whole.size(); ++bit) {
    std::string flipped = whole;
    flipped[bit / 8] = static_cast<char>(flipped[bit / 8] ^ 1 << bit % 8);
    WriteBytes(path, flipped);
    const absl::StatusOr<ImageSet> set = Open();
    if (set.ok()) {
      EXPECT_THAT(set->image(1), ElementsAre('g', 'h', 'i', 'j', 'k', 'l'));
      continue;
    }
    ++refused;
    EXPECT_THAT(set,
                StatusIs(StatusCode::kDataLoss, StartsWith(path + ": byte ")));
  }
  EXPECT_GT(refused, static_cast<int>(8 * (whole.size() - 10)) - 16);
  WriteBytes(path, images_);
  EXPECT_THAT(Open(), StatusIs(StatusCode::kDataLoss,
                               HasSubstr("incorrect header check")));
}

TEST_F(Mnist, FlippedHeadersAreRefused) {
  for (size_t bit = 0; bit < 8 * 16; ++bit) {
    std::string flipped = images_;
    flipped[bit / 8] = static_cast<char>(flipped[bit / 8] ^ 1 << bit % 8);
    WriteBytes(images_path_, flipped);
    EXPECT_THAT(Open(), StatusIs(StatusCode::kDataLoss,
                                 StartsWith(images_path_ + ": byte ")))
        << bit;
  }
}

}  // namespace
}  // namespace tessera
