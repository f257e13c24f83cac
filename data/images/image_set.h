// ImageSet holds labelled images of one size as bytes, for classification.
//
//   image(i)   [C, H, W] bytes, plane after plane, row after row
//   label(i)   0 .. num_classes() - 1
//
// CIFAR's files are mapped and used as they are; MNIST's too if they are not
// compressed. Conversion to numbers, means and augmentation are the model's
// task.
//
//   TESSERA_ASSIGN_OR_RETURN(const ImageSet train,
//                            OpenCifar10(folder, ImageSplit::kTrain));
//
// If the real sets are not available, data/images/made_images.h writes sets of
// the same format. Threads: const methods may run concurrently.
#ifndef DATA_IMAGES_IMAGE_SET_H_
#define DATA_IMAGES_IMAGE_SET_H_

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "data/mapped_file.h"

namespace tessera {

enum class ImageSplit { kTrain, kTest };

// The shape of an image of bytes, plane after plane.
struct ImageShape {
  int64_t channels = 0;
  int64_t height = 0;
  int64_t width = 0;

  int64_t image_bytes() const { return channels * height * width; }
};

// Images that lie in one buffer at equal distances.
struct ImagePart {
  const uint8_t* images = nullptr;  // the first one
  int64_t image_stride = 0;         // bytes from one to the next
  const uint8_t* labels = nullptr;
  int64_t label_stride = 0;
  int64_t num_images = 0;
  std::string labels_path;       // for messages
  int64_t first_label_byte = 0;  // where labels[0] lies in it
};

class ImageSet {
 public:
  int64_t num_images() const { return ends_.empty() ? 0 : ends_.back(); }
  int64_t num_classes() const { return num_classes_; }
  const ImageShape& shape() const { return shape_; }
  int64_t channels() const { return shape_.channels; }
  int64_t height() const { return shape_.height; }
  int64_t width() const { return shape_.width; }

  // Return the channels() * height() * width() bytes of an image, and its
  // class. The bytes are valid as long as this or what it is moved to.
  // REQUIRES: 0 <= index < num_images().
  absl::Span<const uint8_t> image(int64_t index) const;
  int64_t label(int64_t index) const;

  // Makes a set, for readers of formats; the bytes of `parts` lie in `files`
  // and `buffers`. Returns DataLoss naming file, byte and image of the first
  // label that is not below num_classes. O(images): it reads every label.
  static absl::StatusOr<ImageSet> Make(
      ImageShape shape, int64_t num_classes, std::vector<ImagePart> parts,
      std::vector<MappedFile> files, std::vector<std::vector<uint8_t>> buffers);

 private:
  ImageSet() = default;
  absl::Status CheckLabels() const;
  // Returns the part that has an image, and the image's index in it.
  std::pair<const ImagePart*, int64_t> Find(int64_t index) const;

  ImageShape shape_;
  int64_t num_classes_ = 0;
  std::vector<ImagePart> parts_;
  std::vector<int64_t> ends_;                  // images of parts_[0, i]
  std::vector<MappedFile> files_;              // what the parts point into
  std::vector<std::vector<uint8_t>> buffers_;  // or these
};

}  // namespace tessera
#endif  // DATA_IMAGES_IMAGE_SET_H_
