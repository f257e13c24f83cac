// Image sets that are made, not photographed: the files of CIFAR-10 and of
// MNIST, for programs and tests where the real ones are not at hand.
//
// An image of class c has stripes of a direction and a width of c's own (and in
// CIFAR-10 of a colour), moved by a random distance of up to an eighth of their
// width, under noise of a quarter of their height. So a model has something to
// learn, and one that does not learn stays at a tenth. Labels are 0 1 .. 9 0 1
// ..; bits depend on n and seed alone, on every machine (integers throughout).
//
// n images to train on, and max(n / 5, 10) to test with, made of other numbers.
#ifndef DATA_IMAGES_MADE_IMAGES_H_
#define DATA_IMAGES_MADE_IMAGES_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"

namespace tessera {

// data_batch_1.bin .. data_batch_5.bin and test_batch.bin; n >= 5.
absl::Status MakeCifar10(const std::string& folder, int64_t n, uint64_t seed);

// train-images-idx3-ubyte and the other three, 28 x 28; n >= 1.
absl::Status MakeMnist(const std::string& folder, int64_t n, uint64_t seed);

// Both make the folder if it is missing, not the one that it lies in, and
// overwrite files of these names. They return InvalidArgument for an n that is
// less or above 10 million, and the system's words with the path where it
// cannot be written. LOCAL: one rank writes, or each to a folder of its own.

}  // namespace tessera
#endif  // DATA_IMAGES_MADE_IMAGES_H_
