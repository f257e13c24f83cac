// A range of a storage finds its places in the file as follows. A tensor is
// sizes and strides over its storage; its file has it in row-major order. Dims
// are walked in that order, each only as far as the range reaches, so the
// innermost gives runs: numbers that are adjacent in the file and a stride
// apart in memory. A row-major tensor is one run; a transposed matrix has one
// for each row of the file.
#include "checkpoint/exchange/tensor_runs.h"

#include <algorithm>
#include <cstddef>
#include <string>

#include "base/status.h"

namespace tessera {
namespace {

constexpr size_t kBufferBytes = 4 << 20;

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Gathers the runs of one tensor in a range of its storage into writes.
class Runs {
 public:
  Runs(const TensorLayout& tensor, const NumberCast& cast, int64_t begin,
       absl::string_view bytes, const File& file)
      : tensor_(tensor),
        cast_(cast),
        begin_(begin),
        end_(begin + static_cast<int64_t>(bytes.size()) / cast.from_bytes()),
        bytes_(bytes),
        file_(file) {}

  absl::Status Write() {
    TESSERA_RETURN_IF_ERROR(Walk(0, tensor_.offset, 0));
    return Flush();
  }

 private:
  // Walks dim `d` and those after it, from number `base` of the storage on,
  // which is element `out` in the file.
  absl::Status Walk(size_t d, int64_t base, int64_t out) {
    const TensorLayout::Dim& dim = tensor_.dims[d];
    int64_t inner = 1, reach = 0;  // elements, and numbers, of what follows
    for (size_t i = d + 1; i < tensor_.dims.size(); ++i) {
      inner *= tensor_.dims[i].size;
      reach += (tensor_.dims[i].size - 1) * tensor_.dims[i].stride;
    }
    int64_t first = 0, last = dim.size;
    if (dim.stride > 0) {
      first = std::max<int64_t>(
          0, begin_ > base + reach ? CeilDiv(begin_ - base - reach, dim.stride)
                                   : 0);
      last = std::min(dim.size,
                      end_ > base ? CeilDiv(end_ - base, dim.stride) : 0);
    } else if (base >= end_ || base + reach < begin_) {
      return absl::OkStatus();
    }
    if (d + 1 == tensor_.dims.size()) {
      return first < last ? Run(base + first * dim.stride, dim.stride,
                                out + first, last - first)
                          : absl::OkStatus();
    }
    for (int64_t k = first; k < last; ++k) {
      TESSERA_RETURN_IF_ERROR(
          Walk(d + 1, base + k * dim.stride, out + k * inner));
    }
    return absl::OkStatus();
  }

  absl::Status Run(int64_t from, int64_t stride, int64_t out, int64_t n) {
    const char* at = bytes_.data() + (from - begin_) * cast_.from_bytes();
    while (n > 0) {
      if (buffer_.size() >= kBufferBytes || out != next_) {
        TESSERA_RETURN_IF_ERROR(Flush());
        buffer_at_ = next_ = out;
      }
      const int64_t some = std::min<int64_t>(n, kBufferBytes / 8);
      cast_.Append(at, some, stride, &buffer_);
      at += some * stride * cast_.from_bytes();
      out += some;
      next_ = out;
      n -= some;
    }
    return absl::OkStatus();
  }

  absl::Status Flush() {
    if (buffer_.empty()) return absl::OkStatus();
    const absl::Status status =
        file_.WriteAt(tensor_.at + buffer_at_ * cast_.to_bytes(), buffer_);
    buffer_.clear();
    return status;
  }

  const TensorLayout& tensor_;
  const NumberCast& cast_;
  const int64_t begin_, end_;  // numbers
  const absl::string_view bytes_;
  const File& file_;
  std::string buffer_;
  int64_t buffer_at_ = 0, next_ = 0;  // elements of the tensor
};

}  // namespace

absl::Status WriteRuns(const TensorLayout& tensor, const NumberCast& cast,
                       int64_t begin, absl::string_view bytes,
                       const File& file) {
  return Runs(tensor, cast, begin, bytes, file).Write();
}

}  // namespace tessera
