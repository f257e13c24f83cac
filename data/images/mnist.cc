#include "data/images/mnist.h"

#include <unistd.h>

#include <cstdint>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "base/status.h"
#include "data/images/gzip_file.h"
#include "data/mapped_file.h"

namespace tessera {
namespace {

// The real sets have 60,000 x 28 x 28; a larger header is damaged.
constexpr int64_t kMaxBytes = int64_t{4} << 30;

// The memory that an ImageSet's bytes are in: files, and what was unpacked.
struct Storage {
  std::vector<MappedFile> files;
  std::vector<std::vector<uint8_t>> buffers;
};

// A file whose header has been read.
struct Idx {
  std::string path;
  std::vector<int64_t> sizes;
  absl::Span<const uint8_t> data;
  int64_t header_bytes = 0;
};

int64_t BigEndian(const uint8_t* bytes) {
  return int64_t{bytes[0]} << 24 | bytes[1] << 16 | bytes[2] << 8 | bytes[3];
}

// Returns the bytes of `path`, or of `path`.gz unpacked, and keeps them in
// `storage`.
absl::StatusOr<absl::Span<const uint8_t>> ReadBytes(std::string* path,
                                                    Storage* storage) {
  const std::string zipped = *path + ".gz";
  if (access(path->c_str(), F_OK) != 0 && access(zipped.c_str(), F_OK) == 0) {
    *path = zipped;
    TESSERA_ASSIGN_OR_RETURN(std::vector<uint8_t> bytes,
                             ReadGzipFile(zipped, kMaxBytes));
    storage->buffers.push_back(std::move(bytes));
    return absl::Span<const uint8_t>(storage->buffers.back());
  }
  TESSERA_ASSIGN_OR_RETURN(MappedFile file, MappedFile::Open(*path));
  storage->files.push_back(std::move(file));
  return storage->files.back().bytes();
}

// Reads a file in which `dims` sizes follow the magic number 0x000008 `dims`.
absl::StatusOr<Idx> ReadIdx(const std::string& path, int64_t dims,
                            Storage* storage) {
  Idx idx;
  idx.path = path;
  TESSERA_ASSIGN_OR_RETURN(const absl::Span<const uint8_t> bytes,
                           ReadBytes(&idx.path, storage));
  idx.header_bytes = 4 + 4 * dims;
  const auto file_bytes = static_cast<int64_t>(bytes.size());
  if (file_bytes < idx.header_bytes) {
    return absl::DataLossError(absl::StrCat(
        idx.path, ": byte ", file_bytes, ": the data ends in the header of ",
        idx.header_bytes, " bytes; is it truncated?"));
  }
  const int64_t magic = BigEndian(bytes.data());
  if (magic != 0x800 + dims) {
    return absl::DataLossError(
        absl::StrCat(idx.path, ": byte 0: expected idx of bytes with ", dims,
                     " sizes, that is ", 0x800 + dims, ", got ", magic));
  }
  int64_t expected = 1;
  for (int64_t i = 0; i < dims; ++i) {
    const int64_t at = 4 + 4 * i;
    idx.sizes.push_back(BigEndian(bytes.data() + at));
    if (idx.sizes.back() < 1 || idx.sizes.back() > kMaxBytes / expected) {
      return absl::DataLossError(
          absl::StrCat(idx.path, ": byte ", at, ": size ", i, " is ",
                       idx.sizes.back(), ", which cannot be"));
    }
    expected *= idx.sizes.back();
  }
  idx.data = bytes.subspan(static_cast<size_t>(idx.header_bytes));
  if (static_cast<int64_t>(idx.data.size()) != expected) {
    return absl::DataLossError(
        absl::StrCat(idx.path, ": byte ", file_bytes, ": the header says ",
                     expected, " bytes after it, there are ", idx.data.size()));
  }
  return idx;
}

}  // namespace

absl::StatusOr<ImageSet> OpenMnist(const std::string& folder, ImageSplit split,
                                   int64_t num_classes) {
  const std::string prefix =
      folder + (split == ImageSplit::kTest ? "/t10k-" : "/train-");
  Storage storage;
  TESSERA_ASSIGN_OR_RETURN(const Idx images,
                           ReadIdx(prefix + "images-idx3-ubyte", 3, &storage));
  TESSERA_ASSIGN_OR_RETURN(const Idx labels,
                           ReadIdx(prefix + "labels-idx1-ubyte", 1, &storage));
  if (labels.sizes[0] != images.sizes[0]) {
    return absl::DataLossError(absl::StrCat(
        labels.path, ": byte 4: ", labels.sizes[0], " labels, but ",
        images.path, " has ", images.sizes[0], " images"));
  }
  const ImageShape shape = {1, images.sizes[1], images.sizes[2]};
  ImagePart part;
  part.images = images.data.data();
  part.image_stride = shape.image_bytes();
  part.labels = labels.data.data();
  part.label_stride = 1;
  part.num_images = images.sizes[0];
  part.labels_path = labels.path;
  part.first_label_byte = labels.header_bytes;
  return ImageSet::Make(shape, num_classes, {std::move(part)},
                        std::move(storage.files), std::move(storage.buffers));
}

}  // namespace tessera
