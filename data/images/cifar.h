// Reads CIFAR-10 and CIFAR-100 in their "binary version", 3 x 32 x 32:
//
//   CIFAR-10    data_batch_1.bin .. data_batch_5.bin, test_batch.bin
//     record    label | 1024 red | 1024 green | 1024 blue           3073 bytes
//   CIFAR-100   train.bin, test.bin
//     record    coarse label | fine label | 3072 as above           3074 bytes
//
// Source: cs.toronto.edu/~kriz/cifar.html. Files may hold fewer records than
// the real ones do (10,000 and 50,000), but whole ones.
#ifndef DATA_IMAGES_CIFAR_H_
#define DATA_IMAGES_CIFAR_H_

#include <string>

#include "absl/status/statusor.h"
#include "data/images/image_set.h"

namespace tessera {

// Opens the files of `folder` (the archives' cifar-10-batches-bin,
// cifar-100-binary). Returns NotFound naming a file that is missing, and
// DataLoss naming file and byte for one that ends within a record or has a
// label that is no class. LOCAL.
absl::StatusOr<ImageSet> OpenCifar10(const std::string& folder,
                                     ImageSplit split);

enum class Cifar100Labels { kFine, kCoarse };  // 100 classes, or 20 of them
// Opens CIFAR-100; otherwise as OpenCifar10.
absl::StatusOr<ImageSet> OpenCifar100(
    const std::string& folder, ImageSplit split,
    Cifar100Labels labels = Cifar100Labels::kFine);

}  // namespace tessera
#endif  // DATA_IMAGES_CIFAR_H_
