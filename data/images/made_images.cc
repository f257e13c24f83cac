#include "data/images/made_images.h"

#include <errno.h>
#include <sys/stat.h>

#include <algorithm>
#include <cstdio>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "base/bits.h"
#include "base/file.h"
#include "base/status.h"

namespace tessera {
namespace {

constexpr int kClasses = 10;
constexpr int64_t kMaxImages = 10'000'000;

// By class: how far a step to the right and one down move within the stripes,
// which repeat every 256 parts; and the heights in red, green and blue.
struct Look {
  int right, down;
  int height[3];
};
constexpr Look kLooks[kClasses] = {
    {24, 0, {96, 24, 24}},   {0, 24, {24, 96, 24}},   {20, 20, {24, 24, 96}},
    {20, -20, {96, 96, 24}}, {48, 0, {24, 96, 96}},   {0, 48, {96, 24, 96}},
    {36, 36, {64, 64, 64}},  {36, -36, {96, 48, 24}}, {48, 16, {24, 48, 96}},
    {16, -48, {48, 96, 24}}};

// Returns a triangle wave of period 256 from -64 to 64.
int Triangle(int place) {
  const int within = place & 255;
  return (within < 128 ? within : 256 - within) - 64;
}

class Random {
 public:
  explicit Random(uint64_t seed) : state_(MixBits(seed)) {}
  uint64_t Next() { return MixBits(state_ += kMixStep); }

 private:
  uint64_t state_;
};

// Appends channels * side * side bytes.
void AppendImage(int label, int channels, int side, Random* random,
                 std::string* out) {
  const Look& look = kLooks[label];
  const int moved = static_cast<int>(random->Next() % 64) - 32;
  for (int c = 0; c < channels; ++c) {
    const int height = channels == 1 ? 96 : look.height[c];
    uint64_t noise = 0;
    for (int i = 0; i < side * side; ++i) {
      if (i % 8 == 0) noise = random->Next();
      const int x = i % side, y = i / side;
      const int wave = Triangle(x * look.right + y * look.down + moved);
      const int value =
          128 + wave * height / 64 + (static_cast<int>(noise & 63) - 32);
      noise >>= 8;
      out->push_back(static_cast<char>(std::clamp(value, 0, 255)));
    }
  }
}

using File = std::unique_ptr<std::FILE, int (*)(std::FILE*)>;

absl::StatusOr<File> Create(const std::string& path) {
  File file(std::fopen(path.c_str(), "wbe"), &std::fclose);
  if (file == nullptr) return FileError(errno, path);
  return file;
}

absl::Status Write(const File& file, absl::string_view bytes,
                   const std::string& path) {
  if (std::fwrite(bytes.data(), 1, bytes.size(), file.get()) != bytes.size()) {
    return FileError(errno, path);
  }
  return absl::OkStatus();
}

// Closes the file; fclose writes what is still in a buffer, so its result
// matters.
absl::Status Close(File file, const std::string& path) {
  if (std::fclose(file.release()) != 0) return FileError(errno, path);
  return absl::OkStatus();
}

absl::Status Begin(const std::string& folder, int64_t n, int64_t least) {
  if (n < least || n > kMaxImages) {
    return absl::InvalidArgumentError(absl::StrCat(
        folder, ": expected ", least, " to ", kMaxImages, " images, got ", n));
  }
  if (mkdir(folder.c_str(), 0777) != 0 && errno != EEXIST) {
    return FileError(errno, folder);
  }
  return absl::OkStatus();
}

int64_t NumTest(int64_t n) { return std::max<int64_t>(n / 5, kClasses); }

// Images of two sets, or of two files, come from different random numbers.
Random RandomOf(uint64_t seed, uint64_t file) {
  return Random(MixBits(seed) ^ (file + 1) * kMixStep);
}

absl::Status WriteCifarFile(const std::string& path, int64_t first,
                            int64_t count, Random random) {
  TESSERA_ASSIGN_OR_RETURN(File file, Create(path));
  std::string record;
  for (int64_t i = first; i < first + count; ++i) {
    const int label = static_cast<int>(i % kClasses);
    record.assign(1, static_cast<char>(label));
    AppendImage(label, 3, 32, &random, &record);
    TESSERA_RETURN_IF_ERROR(Write(file, record, path));
  }
  return Close(std::move(file), path);
}

void AppendBigEndian(int64_t value, std::string* out) {
  for (int shift = 24; shift >= 0; shift -= 8) {
    out->push_back(static_cast<char>(value >> shift & 0xFF));
  }
}

absl::Status WriteMnistFiles(const std::string& prefix, int64_t count,
                             Random random) {
  constexpr int kSide = 28;
  const std::string labels_path = prefix + "labels-idx1-ubyte";
  const std::string images_path = prefix + "images-idx3-ubyte";
  TESSERA_ASSIGN_OR_RETURN(File labels, Create(labels_path));
  TESSERA_ASSIGN_OR_RETURN(File images, Create(images_path));
  std::string bytes;
  for (const int64_t number : {int64_t{0x801}, count}) {
    AppendBigEndian(number, &bytes);
  }
  for (int64_t i = 0; i < count; ++i) {
    bytes.push_back(static_cast<char>(i % kClasses));
  }
  TESSERA_RETURN_IF_ERROR(Write(labels, bytes, labels_path));
  bytes.clear();
  for (const int64_t number :
       {int64_t{0x803}, count, int64_t{kSide}, int64_t{kSide}}) {
    AppendBigEndian(number, &bytes);
  }
  for (int64_t i = 0; i < count; ++i) {
    AppendImage(static_cast<int>(i % kClasses), 1, kSide, &random, &bytes);
    TESSERA_RETURN_IF_ERROR(Write(images, bytes, images_path));
    bytes.clear();
  }
  TESSERA_RETURN_IF_ERROR(Close(std::move(labels), labels_path));
  return Close(std::move(images), images_path);
}

}  // namespace

absl::Status MakeCifar10(const std::string& folder, int64_t n, uint64_t seed) {
  constexpr int64_t kFiles = 5;
  TESSERA_RETURN_IF_ERROR(Begin(folder, n, kFiles));
  for (int64_t i = 0; i < kFiles; ++i) {
    const int64_t first = n * i / kFiles, end = n * (i + 1) / kFiles;
    TESSERA_RETURN_IF_ERROR(WriteCifarFile(
        absl::StrCat(folder, "/data_batch_", i + 1, ".bin"), first, end - first,
        RandomOf(seed, static_cast<uint64_t>(i))));
  }
  return WriteCifarFile(folder + "/test_batch.bin", 0, NumTest(n),
                        RandomOf(seed, kFiles));
}

absl::Status MakeMnist(const std::string& folder, int64_t n, uint64_t seed) {
  TESSERA_RETURN_IF_ERROR(Begin(folder, n, 1));
  TESSERA_RETURN_IF_ERROR(
      WriteMnistFiles(folder + "/train-", n, RandomOf(seed, 0)));
  return WriteMnistFiles(folder + "/t10k-", NumTest(n), RandomOf(seed, 1));
}

}  // namespace tessera
