// SafetensorsExport writes a checkpoint's values as safetensors files that
// Hugging Face's libraries read: model.safetensors, or
// model-00001-of-00003.safetensors and so on with model.safetensors.index.json.
// The place of every number is known beforehand, so all ranks write at once,
// each what it has, in any order.
//
//   one process   Create()
//   all           Write(...) of every number once, Sync()
//   one process   Commit()
//
// Until Commit the files have names that end in ".tmp". No torch.
//
// Threads: one.
#ifndef CHECKPOINT_EXCHANGE_SAFETENSORS_EXPORT_H_
#define CHECKPOINT_EXCHANGE_SAFETENSORS_EXPORT_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "checkpoint/disk/folder.h"
#include "checkpoint/exchange/name_map.h"
#include "checkpoint/exchange/safetensors_header.h"
#include "checkpoint/exchange/tensor_runs.h"
#include "checkpoint/format/manifest.pb.h"

namespace tessera {

struct SafetensorsExportOptions {
  // Dtype of floating-point numbers: "F32" or "BF16" (rounded to nearest, ties
  // to even); "": that of the checkpoint, float32 for what trains.
  std::string dtype;
  NameMap names;
  int64_t max_file_bytes = 5'000'000'000;  // a larger tensor has its own file
};

// Returns the index of the state "value" of a storage; -1 if it has none.
int ValueState(const proto::CheckpointStorage& storage);

class SafetensorsExport {
 public:
  // Plans where all of `head`'s tensors go; a tensor with several names goes
  // under its first one. Creates `folder` if it is not there. Gives the same
  // plan on all ranks for the same arguments. LOCAL. Returns InvalidArgument
  // for two tensors of one name, another dtype, a name that the format does not
  // allow, or a tensor far larger than its storage; Unimplemented for complex
  // numbers or a transposition of what is no matrix; AlreadyExists if `folder`
  // has safetensors files.
  static absl::StatusOr<SafetensorsExport> Plan(
      const std::string& folder, const proto::CheckpointManifest& head,
      SafetensorsExportOptions options, FileSystem* files);

  // Creates the files and their headers. LOCAL.
  absl::Status Create();
  // Writes values [begin, ...) of a storage, in the dtype that `head` says.
  // Ranks that write the same numbers must write the same values. LOCAL.
  absl::Status Write(int storage, int64_t begin, absl::string_view bytes);
  // Waits until all that was written is on the disk. LOCAL.
  absl::Status Sync();
  // Gives the files their names. Returns DataLoss if one is not as long as
  // planned. LOCAL.
  absl::Status Commit();
  // Removes what Create and Commit have made, after an error. LOCAL.
  void Abandon();

  // Returns a text of what goes where and in which dtype; equal plans have
  // equal texts. LOCAL.
  std::string Fingerprint() const;

 private:
  struct Tensor : SafetensorsTensor {  // in the exported file
    std::vector<int64_t> strides;      // in numbers of the storage
    int storage = 0;
    TensorLayout layout;  // dims: without those that can be taken for one
  };
  struct Output {
    std::string name;
    std::string header;
    int64_t bytes = 0;
    std::unique_ptr<File> open;
  };

  SafetensorsExport(Folder folder, SafetensorsExportOptions options)
      : folder_(std::move(folder)), options_(std::move(options)) {}
  absl::Status AddTensors(const proto::CheckpointManifest& head);
  absl::Status AddTensor(int storage, const proto::CheckpointTensor& tensor);
  absl::Status Arrange();
  std::string IndexJson() const;
  absl::StatusOr<File*> Open(size_t file, bool make = false);

  Folder folder_;
  SafetensorsExportOptions options_;
  std::vector<Tensor> tensors_;
  std::vector<Output> outputs_;
  std::vector<std::string> renamed_;  // the files that Commit has renamed
  std::vector<std::vector<size_t>>
      of_storage_;                   // by storage, indices in tensors_
  std::vector<std::string> dtypes_;  // by storage, the exported dtype
  int64_t total_bytes_ = 0;
};

}  // namespace tessera
#endif  // CHECKPOINT_EXCHANGE_SAFETENSORS_EXPORT_H_
