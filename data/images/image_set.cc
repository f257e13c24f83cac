#include "data/images/image_set.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/status.h"

namespace tessera {

absl::StatusOr<ImageSet> ImageSet::Make(
    ImageShape shape, int64_t num_classes, std::vector<ImagePart> parts,
    std::vector<MappedFile> files, std::vector<std::vector<uint8_t>> buffers) {
  ImageSet set;
  set.shape_ = shape;
  set.num_classes_ = num_classes;
  set.parts_ = std::move(parts);
  set.files_ = std::move(files);
  set.buffers_ = std::move(buffers);
  int64_t end = 0;
  for (const ImagePart& part : set.parts_) {
    set.ends_.push_back(end += part.num_images);
  }
  TESSERA_RETURN_IF_ERROR(set.CheckLabels());
  return set;
}

absl::Status ImageSet::CheckLabels() const {
  for (const ImagePart& part : parts_) {
    for (int64_t i = 0; i < part.num_images; ++i) {
      const int64_t at = i * part.label_stride;
      if (part.labels[at] < num_classes_) continue;
      return absl::DataLossError(
          absl::StrCat(part.labels_path, ": byte ", part.first_label_byte + at,
                       ": the label of image ", i, " is ", part.labels[at],
                       ", expected 0 to ", num_classes_ - 1));
    }
  }
  return absl::OkStatus();
}

std::pair<const ImagePart*, int64_t> ImageSet::Find(int64_t index) const {
  TESSERA_CHECK_GE(index, 0);
  TESSERA_CHECK_LT(index, num_images());
  const auto part = static_cast<size_t>(
      std::upper_bound(ends_.begin(), ends_.end(), index) - ends_.begin());
  return {&parts_[part], index - (ends_[part] - parts_[part].num_images)};
}

absl::Span<const uint8_t> ImageSet::image(int64_t index) const {
  const auto [part, i] = Find(index);
  return {part->images + i * part->image_stride,
          static_cast<size_t>(shape_.image_bytes())};
}

int64_t ImageSet::label(int64_t index) const {
  const auto [part, i] = Find(index);
  return part->labels[i * part->label_stride];
}

}  // namespace tessera
