// MNIST, FashionMNIST and others of its format (idx), 1 x H x W:
//
//   train-images-idx3-ubyte   0x00000803, images, rows, columns; the images
//   train-labels-idx1-ubyte   0x00000801, labels; one byte each
//   t10k-..., t10k-...        the same of the test set
//
// Numbers of headers are big-endian int32. Source: yann.lecun.com/exdb/mnist
// (the format), github.com/zalandoresearch/fashion-mnist.
#ifndef DATA_IMAGES_MNIST_H_
#define DATA_IMAGES_MNIST_H_

#include <string>

#include "absl/status/statusor.h"
#include "data/images/image_set.h"

namespace tessera {

// The two files of `folder`; where one is not there, the same name with ".gz",
// which is unpacked into memory. NotFound naming a file that is missing;
// DataLoss naming file and byte where a header is none, a file is too short or
// too long, there are other than as many labels as images, a label is not below
// num_classes, or a .gz is damaged. LOCAL.
absl::StatusOr<ImageSet> OpenMnist(const std::string& folder, ImageSplit split,
                                   int64_t num_classes = 10);

}  // namespace tessera
#endif  // DATA_IMAGES_MNIST_H_
