// WriteRuns writes numbers of a storage to where a tensor of it lies in a file.
// No torch.
#ifndef CHECKPOINT_EXCHANGE_TENSOR_RUNS_H_
#define CHECKPOINT_EXCHANGE_TENSOR_RUNS_H_

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "checkpoint/disk/folder.h"
#include "checkpoint/exchange/number_cast.h"

namespace tessera {

// The layout of a tensor that has elements.
struct TensorLayout {
  struct Dim {
    int64_t size, stride;  // in numbers of the storage
  };
  int64_t offset = 0;     // in the storage
  std::vector<Dim> dims;  // at least one, in the file in row-major order
  int64_t at = 0;         // bytes, in the file
};

// Writes those of the storage's numbers [begin, ...), which are in `bytes`,
// that belong to the tensor. LOCAL.
absl::Status WriteRuns(const TensorLayout& tensor, const NumberCast& cast,
                       int64_t begin, absl::string_view bytes,
                       const File& file);

}  // namespace tessera
#endif  // CHECKPOINT_EXCHANGE_TENSOR_RUNS_H_
