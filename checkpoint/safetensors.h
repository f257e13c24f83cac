// Safetensors reads parts of Hugging Face's files of named tensors (format:
// checkpoint/exchange/safetensors_files.h).
#ifndef CHECKPOINT_SAFETENSORS_H_
#define CHECKPOINT_SAFETENSORS_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "base/layout/layout.h"
#include "checkpoint/exchange/safetensors_files.h"

namespace tessera {

// Returns Undefined where libtorch has no such dtype.
at::ScalarType DtypeOf(const SafetensorsTensor& tensor);

// Threads: const methods may be called from any thread.
class Safetensors {
 public:
  // Opens files as SafetensorsFiles::Open does. LOCAL.
  static absl::StatusOr<std::unique_ptr<Safetensors>> Open(
      const std::string& path);

  // These are those of SafetensorsFiles.
  const std::string& path() const { return files_->path(); }
  const std::vector<SafetensorsTensor>& tensors() const {
    return files_->tensors();
  }
  const SafetensorsTensor* Find(absl::string_view name) const {
    return files_->Find(name);
  }
  std::string Describe(const SafetensorsTensor& tensor) const {
    return files_->Describe(tensor);
  }
  const std::vector<std::pair<std::string, std::string>>& metadata() const {
    return files_->metadata();
  }
  absl::StatusOr<std::string> Fingerprint() const {
    return files_->Fingerprint();
  }
  absl::Status CheckUnchanged() const { return files_->CheckUnchanged(); }

  // Reads elements [begin, end) of one of the tensors, in row-major order, into
  // `out`, cast to its dtype; complex numbers count as two elements. `out` is
  // [elements.numel()], contiguous, real, on any device. LOCAL. Returns
  // Unimplemented for a dtype that libtorch lacks, and DataLoss if the file was
  // truncated since. REQUIRES: the range lies within the tensor.
  absl::Status Read(const SafetensorsTensor& tensor, Range elements,
                    const at::Tensor& out) const;
  absl::Status ReadBytes(const SafetensorsTensor& tensor, int64_t begin,
                         char* to, int64_t bytes) const {
    return files_->ReadBytes(tensor, begin, to, bytes);
  }
  // Returns the bytes of the elements that all calls of Read have read.
  int64_t bytes_read() const { return bytes_read_; }

 private:
  explicit Safetensors(std::unique_ptr<SafetensorsFiles> files)
      : files_(std::move(files)) {}

  const std::unique_ptr<SafetensorsFiles> files_;
  mutable std::atomic<int64_t> bytes_read_{0};
};

}  // namespace tessera
#endif  // CHECKPOINT_SAFETENSORS_H_
