// SafetensorsFiles reads Hugging Face's format of named tensors, as bytes. No
// torch.
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
// Open checks everything that a header says. Files are read by pread, in
// pieces, never mapped: a file that is truncated later causes an error and no
// signal.
#ifndef CHECKPOINT_EXCHANGE_SAFETENSORS_FILES_H_
#define CHECKPOINT_EXCHANGE_SAFETENSORS_FILES_H_

#include <sys/stat.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "checkpoint/exchange/safetensors_header.h"

namespace tessera {

// Threads: const methods may be called from any thread.
class SafetensorsFiles {
 public:
  // Opens `path`: a file, an index (its name ends in .json), or a folder: its
  // model.safetensors.index.json, else its model.safetensors, else the only
  // file that ends in .safetensors. LOCAL. Reads headers only, in O(tensors log
  // tensors). Errors name file, tensor and what was expected: NotFound,
  // PermissionDenied, ..., DataLoss (no safetensors, truncated, a header that
  // contradicts itself or the index).
  static absl::StatusOr<std::unique_ptr<SafetensorsFiles>> Open(
      const std::string& path);
  ~SafetensorsFiles();
  SafetensorsFiles(const SafetensorsFiles&) = delete;
  SafetensorsFiles& operator=(const SafetensorsFiles&) = delete;

  // Returns the path that Open was given.
  const std::string& path() const { return path_; }
  // Returns the tensors, sorted by name.
  const std::vector<SafetensorsTensor>& tensors() const { return tensors_; }
  // Returns null if there is no tensor of that name.
  const SafetensorsTensor* Find(absl::string_view name) const;
  // Returns "folder/model-00002-of-00003.safetensors: tensor 'a.b'", for
  // messages.
  std::string Describe(const SafetensorsTensor& tensor) const;
  // Returns the metadata of all files, in the order of the headers.
  const std::vector<std::pair<std::string, std::string>>& metadata() const {
    return metadata_;
  }

  // Reads `bytes` bytes of a tensor, from its byte `begin` on. Returns DataLoss
  // if the file was truncated since. LOCAL. REQUIRES: they lie within the
  // tensor.
  absl::Status ReadBytes(const SafetensorsTensor& tensor, int64_t begin,
                         char* to, int64_t bytes) const;

  // Returns a line that is equal for equal files, as far as that shows without
  // reading all of them: sizes, headers, and the ends of each tensor. LOCAL.
  absl::StatusOr<std::string> Fingerprint() const;
  // Returns Aborted if a file was written to since it was opened, so that what
  // was read may be of two versions. Replacing a file does not matter: this
  // still reads the one that it opened. LOCAL.
  absl::Status CheckUnchanged() const;

 private:
  struct File {
    std::string path;
    int fd;
    struct stat opened;       // from before anything was read
    uint32_t header_crc = 0;  // CRC32C
  };
  explicit SafetensorsFiles(std::string path) : path_(std::move(path)) {}
  absl::Status OpenIndex(const std::string& path);
  absl::Status AddFile(const std::string& path);
  void Index();

  const std::string path_;
  std::vector<File> files_;
  std::vector<SafetensorsTensor> tensors_;
  absl::flat_hash_map<std::string, size_t> places_;  // indices in tensors_
  std::vector<std::pair<std::string, std::string>> metadata_;
};

}  // namespace tessera
#endif  // CHECKPOINT_EXCHANGE_SAFETENSORS_FILES_H_
