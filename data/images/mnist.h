// Reads MNIST, FashionMNIST and other sets in its format (idx), 1 x H x W:
//
//   train-images-idx3-ubyte   0x00000803, images, rows, columns; the images
//   train-labels-idx1-ubyte   0x00000801, labels; one byte each
//   t10k-..., t10k-...        the test set in the same formats
//
// Numbers in headers are big-endian int32. Source: yann.lecun.com/exdb/mnist
// (the format), github.com/zalandoresearch/fashion-mnist.
#ifndef DATA_IMAGES_MNIST_H_
#define DATA_IMAGES_MNIST_H_

#include <string>

#include "absl/status/statusor.h"
#include "data/images/image_set.h"

namespace tessera {

// Opens the two files of `folder`; where one is missing, the same name with
// ".gz", which is unpacked into memory. Returns NotFound naming a missing file,
// and DataLoss naming file and byte if a header is wrong, a file is too short
// or too long, the numbers of labels and images differ, a label is not below
// num_classes, or a .gz is damaged. LOCAL.
absl::StatusOr<ImageSet> OpenMnist(const std::string& folder, ImageSplit split,
                                   int64_t num_classes = 10);

}  // namespace tessera
#endif  // DATA_IMAGES_MNIST_H_
