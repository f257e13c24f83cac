// Writes synthetic image sets in the files of CIFAR-10 and MNIST, for programs
// and tests that do not have the real ones.
//
// An image of class c has stripes of c's own direction and width (and in
// CIFAR-10 colour), shifted by a random distance of up to an eighth of their
// width, under noise of a quarter of their height. So a model has something to
// learn, and one that does not learn stays at 10 % accuracy. Labels are 0 1 ..
// 9 0 1 ..; the bits depend on n and seed alone, on every machine (integers
// throughout).
//
// There are n images to train on, and max(n / 5, 10) to test with, made from
// other random numbers.
#ifndef DATA_IMAGES_MADE_IMAGES_H_
#define DATA_IMAGES_MADE_IMAGES_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"

namespace tessera {

// Writes data_batch_1.bin .. data_batch_5.bin and test_batch.bin; n >= 5.
absl::Status MakeCifar10(const std::string& folder, int64_t n, uint64_t seed);

// Writes train-images-idx3-ubyte and the other three, 28 x 28; n >= 1.
absl::Status MakeMnist(const std::string& folder, int64_t n, uint64_t seed);

// Both create the folder if it is missing, but not its parent, and overwrite
// files of these names. They return InvalidArgument if n is too small or above
// 10 million, and the system's words with the path if it cannot be written.
// LOCAL: one rank writes, or each writes to a folder of its own.

}  // namespace tessera
#endif  // DATA_IMAGES_MADE_IMAGES_H_
