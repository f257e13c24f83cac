// ElementFormat: describes how the elements of a state lie in memory, and in
// the same way on a disk:
//
//   one by one    | x0 | x1 | x2 | ...         numbers of a dtype
//   in blocks     | x0 .. x63 | x64 .. | ...   a block's elements in so many
//                                              bytes, which tensors hold as
//                                              kByte; the last one is whole
//
// Elements are counted from the first of a block. Arithmetic only.
#ifndef OFFLOAD_ELEMENT_FORMAT_H_
#define OFFLOAD_ELEMENT_FORMAT_H_

#include <cstdint>

#include "base/layout/layout.h"
#include "c10/core/ScalarType.h"

namespace tessera {

struct ElementFormat {
  ElementFormat(at::ScalarType dtype = at::kFloat)  // NOLINT: is a format
      : dtype(dtype),
        block_bytes(static_cast<int64_t>(c10::elementSize(dtype))) {}
  static ElementFormat Blocks(int64_t numel, int64_t bytes) {
    ElementFormat format(at::kByte);
    format.block_numel = numel;
    format.block_bytes = bytes;
    return format;
  }

  bool in_blocks() const { return block_numel != 1; }
  // Returns the bytes of the first `numel` elements.
  int64_t BytesOf(int64_t numel) const {
    return (numel + block_numel - 1) / block_numel * block_bytes;
  }
  // Returns where elements lie in a tensor of them. REQUIRES: they begin with a
  // block.
  Range InTensor(Range elements) const {
    if (!in_blocks()) return elements;
    const int64_t begin = BytesOf(elements.begin);
    return {begin, begin + BytesOf(elements.numel())};
  }
  int64_t TensorNumel(int64_t numel) const { return InTensor({0, numel}).end; }

  at::ScalarType dtype;  // of tensors
  int64_t block_numel = 1;
  int64_t block_bytes;
};

}  // namespace tessera
#endif  // OFFLOAD_ELEMENT_FORMAT_H_
