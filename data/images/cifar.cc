#include "data/images/cifar.h"

#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status.h"

namespace tessera {
namespace {

constexpr ImageShape kShape = {3, 32, 32};

// A record is `label_bytes` of labels and an image; the one at `label` counts.
struct Records {
  int64_t label_bytes;
  int64_t label;
  int64_t num_classes;
};

absl::StatusOr<ImageSet> Open(const std::vector<std::string>& paths,
                              const Records& records) {
  const int64_t record_bytes = records.label_bytes + kShape.image_bytes();
  std::vector<ImagePart> parts;
  std::vector<MappedFile> files;
  for (const std::string& path : paths) {
    TESSERA_ASSIGN_OR_RETURN(MappedFile file, MappedFile::Open(path));
    const auto file_bytes = static_cast<int64_t>(file.bytes().size());
    ImagePart part;
    part.num_images = file_bytes / record_bytes;
    if (file_bytes % record_bytes != 0) {
      return absl::DataLossError(
          absl::StrCat(path, ": byte ", part.num_images * record_bytes,
                       ": expected records of ", record_bytes,
                       " bytes, the file ends after ",
                       file_bytes % record_bytes, " bytes of the last one"));
    }
    part.images = file.bytes().data() + records.label_bytes;
    part.labels = file.bytes().data() + records.label;
    part.image_stride = part.label_stride = record_bytes;
    part.labels_path = path;
    part.first_label_byte = records.label;
    parts.push_back(std::move(part));
    files.push_back(std::move(file));
  }
  return ImageSet::Make(kShape, records.num_classes, std::move(parts),
                        std::move(files), {});
}

}  // namespace

absl::StatusOr<ImageSet> OpenCifar10(const std::string& folder,
                                     ImageSplit split) {
  std::vector<std::string> paths;
  if (split == ImageSplit::kTest) {
    paths.push_back(folder + "/test_batch.bin");
  } else {
    for (int i = 1; i <= 5; ++i) {
      paths.push_back(absl::StrCat(folder, "/data_batch_", i, ".bin"));
    }
  }
  return Open(paths, {1, 0, 10});
}

absl::StatusOr<ImageSet> OpenCifar100(const std::string& folder,
                                      ImageSplit split, Cifar100Labels labels) {
  const bool fine = labels == Cifar100Labels::kFine;
  return Open(
      {folder + (split == ImageSplit::kTest ? "/test.bin" : "/train.bin")},
      {2, fine ? 1 : 0, fine ? 100 : 20});
}

}  // namespace tessera
