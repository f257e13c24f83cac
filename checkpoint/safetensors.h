// Safetensors: Hugging Face's format of named tensors, read in parts.
//
//   8 bytes   H, the header's length, little-endian; at most 100,000,000
//   H bytes   JSON: {"name": {"dtype": "F32", "shape": [2, 3],
//             "data_offsets": [0, 24]}, ..., "__metadata__": {"k": "text"}}
//   the rest  the tensors' elements, little-endian, in row-major order;
//             data_offsets count from here, [first byte, end), and cover all of
//             it, without holes or overlaps
//
// A model is one file, or a folder of several with an index
// (model.safetensors.index.json: {"weight_map": {"name": "file"}}).
//
// Everything that a header says is checked when it is opened. Files are read by
// pread, in pieces, never mapped: one that is cut off later is an error and no
// signal.
#ifndef CHECKPOINT_SAFETENSORS_H_
#define CHECKPOINT_SAFETENSORS_H_

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "checkpoint/safetensors_header.h"
#include "sharding/layout/layout.h"

namespace tessera {

// Threads: const methods may be called from any thread.
class Safetensors {
 public:
  // `path`: a file, an index (its name ends in .json), or a folder: its
  // model.safetensors.index.json, else its model.safetensors, else the one file
  // that ends in .safetensors. LOCAL. Reads headers only, O(tensors log
  // tensors).
  // Errors name file, tensor and what was expected: NotFound,
  // PermissionDenied, ..., DataLoss (no safetensors, truncated, a header that
  // contradicts itself or the index).
  static absl::StatusOr<std::unique_ptr<Safetensors>> Open(
      const std::string& path);
  ~Safetensors();
  Safetensors(const Safetensors&) = delete;
  Safetensors& operator=(const Safetensors&) = delete;

  // As it was opened.
  const std::string& path() const { return path_; }
  // Sorted by name.
  const std::vector<SafetensorsTensor>& tensors() const { return tensors_; }
  // Null if there is none of that name.
  const SafetensorsTensor* Find(absl::string_view name) const;
  // "folder/model-00002-of-00003.safetensors: tensor 'a.b'", for messages.
  std::string Describe(const SafetensorsTensor& tensor) const;
  // Of all files, in the order of the headers.
  const std::vector<std::pair<std::string, std::string>>& metadata() const {
    return metadata_;
  }

  // out = the elements [begin, end) of a tensor of this, in row-major order,
  // cast to out's dtype; complex numbers count as two elements. `out`:
  // [elements.numel()], contiguous, real, any device. LOCAL.
  // Unimplemented: a dtype that libtorch has not. DataLoss: the file was cut
  // off since. REQUIRES: the range lies within the tensor.
  absl::Status Read(const SafetensorsTensor& tensor, Range elements,
                    const at::Tensor& out) const;
  // Of elements, by all calls of Read.
  int64_t bytes_read() const { return bytes_read_; }

 private:
  struct File {
    std::string path;
    int fd;
  };
  explicit Safetensors(std::string path) : path_(std::move(path)) {}
  absl::Status OpenIndex(const std::string& path);
  absl::Status AddFile(const std::string& path);
  void Index();

  const std::string path_;
  std::vector<File> files_;
  std::vector<SafetensorsTensor> tensors_;
  absl::flat_hash_map<std::string, size_t> places_;  // in tensors_
  std::vector<std::pair<std::string, std::string>> metadata_;
  mutable std::atomic<int64_t> bytes_read_{0};
};

// Writes one file: elements in row-major order, larger dtypes first and then by
// name, so that each is aligned, and the same tensors give the same bytes.
// Written as path.tmp, fsynced and renamed: under its name the file is
// complete, always; a failure leaves what was there. LOCAL: one rank calls it.
// {"format": "pt"} is what Hugging Face's transformers ask for.
// InvalidArgument: two tensors of one name, a name that is not UTF-8 or is
// __metadata__, an undefined tensor, a dtype that the format has not.
absl::Status WriteSafetensors(
    const std::string& path,
    const std::vector<std::pair<std::string, at::Tensor>>& tensors,
    const std::map<std::string, std::string>& metadata = {{"format", "pt"}});

}  // namespace tessera
#endif  // CHECKPOINT_SAFETENSORS_H_
