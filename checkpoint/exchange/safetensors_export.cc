#include "checkpoint/exchange/safetensors_export.h"

#include <algorithm>
#include <set>
#include <tuple>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "base/crc32c.h"
#include "base/json.h"
#include "base/status.h"
#include "checkpoint/exchange/number_cast.h"
#include "checkpoint/exchange/safetensors_header.h"
#include "checkpoint/format/manifest.h"

namespace tessera {
namespace {

constexpr char kFileSuffix[] = ".safetensors";
constexpr char kTemporary[] = ".tmp";
constexpr char kIndexFile[] = "model.safetensors.index.json";
// The most elements that all tensors of a storage may have: several times what
// it has, or few. Strides of zero could make any number of them.
constexpr int64_t kMostViews = 16;
constexpr int64_t kFewElements = int64_t{1} << 24;

}  // namespace

int ValueState(const proto::CheckpointStorage& storage) {
  for (int i = 0; i < storage.states_size(); ++i) {
    if (storage.states(i).name() == "value") return i;
  }
  return -1;
}

absl::StatusOr<SafetensorsExport> SafetensorsExport::Plan(
    const std::string& folder, const proto::CheckpointManifest& head,
    SafetensorsExportOptions options, FileSystem* files) {
  if (!options.dtype.empty() && options.dtype != "F32" &&
      options.dtype != "BF16") {
    return absl::InvalidArgumentError(absl::StrCat(
        "dtype '", options.dtype, "': expected F32, BF16 or nothing"));
  }
  if (options.max_file_bytes < 1) {
    return absl::InvalidArgumentError("max_file_bytes: expected at least 1");
  }
  TESSERA_ASSIGN_OR_RETURN(Folder made, Folder::Make(folder, files));
  SafetensorsExport result(std::move(made), std::move(options));
  TESSERA_ASSIGN_OR_RETURN(const std::vector<std::string> names,
                           result.folder_.Names());
  for (const std::string& name : names) {
    if (!absl::EndsWith(name, kFileSuffix) && name != kIndexFile) continue;
    return absl::AlreadyExistsError(absl::StrCat(
        folder, ": holds ", name, " already; name another folder"));
  }
  TESSERA_RETURN_IF_ERROR(result.AddTensors(head));
  TESSERA_RETURN_IF_ERROR(result.Arrange());
  return result;
}

absl::Status SafetensorsExport::AddTensors(
    const proto::CheckpointManifest& head) {
  std::set<std::string> names;
  of_storage_.resize(static_cast<size_t>(head.storages_size()));
  for (int s = 0; s < head.storages_size(); ++s) {
    const proto::CheckpointStorage& storage = head.storages(s);
    const int value = ValueState(storage);
    dtypes_.push_back(value < 0 ? "" : storage.states(value).dtype());
    if (value < 0) continue;
    // Tensors with the same offset, sizes and strides are one under several
    // names.
    std::set<std::tuple<int64_t, std::vector<int64_t>, std::vector<int64_t>>>
        places;
    int64_t elements = 0;
    for (const proto::CheckpointTensor& tensor : storage.tensors()) {
      if (options_.names.Theirs(tensor.name()).name.empty()) continue;
      const bool is_new =
          places
              .emplace(tensor.offset(),
                       std::vector<int64_t>(tensor.sizes().begin(),
                                            tensor.sizes().end()),
                       std::vector<int64_t>(tensor.strides().begin(),
                                            tensor.strides().end()))
              .second;
      if (!is_new) continue;
      TESSERA_RETURN_IF_ERROR(AddTensor(s, tensor));
      elements += tensors_.back().numel;
      if (elements > std::max(kFewElements, kMostViews * storage.numel())) {
        return absl::InvalidArgumentError(absl::StrCat(
            "'", tensor.name(), "' is [",
            absl::StrJoin(tensors_.back().sizes, ", "), "], of a storage of ",
            storage.numel(), " numbers: files would have ", elements,
            " of it; leave it out by a rule '", tensor.name(), " -'"));
      }
      if (!names.insert(tensors_.back().name).second) {
        return absl::InvalidArgumentError(absl::StrCat(
            "two tensors would be called '", tensors_.back().name,
            "', one of them '", tensor.name(), "'; name them apart"));
      }
    }
  }
  return absl::OkStatus();
}

absl::Status SafetensorsExport::AddTensor(
    int storage, const proto::CheckpointTensor& tensor) {
  const NameMap::Name name = options_.names.Theirs(tensor.name());
  if (tensor.complex()) {
    return absl::UnimplementedError(
        absl::StrCat("'", tensor.name(), "' holds complex numbers"));
  }
  Tensor added;
  added.name = name.name;
  added.storage = storage;
  added.layout.offset = tensor.offset();
  added.dtype_name = dtypes_.back();
  if (NumberCast::IsFloat(added.dtype_name) && !options_.dtype.empty()) {
    added.dtype_name = options_.dtype;
  }
  added.sizes.assign(tensor.sizes().begin(), tensor.sizes().end());
  added.strides.assign(tensor.strides().begin(), tensor.strides().end());
  if (name.transposed) {
    if (added.sizes.size() != 2) {
      return absl::UnimplementedError(
          absl::StrCat("'", tensor.name(), "' has ", added.sizes.size(),
                       " dimensions, and a transposed one has two"));
    }
    std::swap(added.sizes[0], added.sizes[1]);
    std::swap(added.strides[0], added.strides[1]);
  }
  added.numel = 1;
  for (const int64_t size : added.sizes) added.numel *= size;
  added.item_bytes = DtypeBytes(added.dtype_name);
  added.bytes = added.numel * added.item_bytes;
  std::vector<TensorLayout::Dim>& dims = added.layout.dims;
  for (size_t d = 0; d < added.sizes.size(); ++d) {
    if (added.sizes[d] == 1) continue;
    const TensorLayout::Dim dim = {added.sizes[d], added.strides[d]};
    if (!dims.empty() && dims.back().stride == dim.size * dim.stride) {
      dims.back() = {dims.back().size * dim.size, dim.stride};
    } else {
      dims.push_back(dim);
    }
  }
  if (dims.empty()) dims.push_back({1, 1});
  of_storage_[static_cast<size_t>(storage)].push_back(tensors_.size());
  tensors_.push_back(std::move(added));
  return absl::OkStatus();
}

// Keeps the order of the model, except that wider numbers come first in a file,
// so that all are aligned.
absl::Status SafetensorsExport::Arrange() {
  std::vector<std::vector<Tensor*>> in_file(1);
  int64_t filled = 0;
  for (Tensor& tensor : tensors_) {
    if (filled > 0 && filled + tensor.bytes > options_.max_file_bytes) {
      in_file.emplace_back();
      filled = 0;
    }
    filled += tensor.bytes;
    total_bytes_ += tensor.bytes;
    tensor.file = static_cast<int>(in_file.size()) - 1;
    in_file.back().push_back(&tensor);
  }
  for (size_t f = 0; f < in_file.size(); ++f) {
    std::stable_sort(in_file[f].begin(), in_file[f].end(),
                     [](const Tensor* a, const Tensor* b) {
                       return a->item_bytes > b->item_bytes;
                     });
    Output output;
    output.name =
        in_file.size() == 1
            ? absl::StrCat("model", kFileSuffix)
            : absl::StrFormat("model-%05d-of-%05d%s", static_cast<int>(f + 1),
                              static_cast<int>(in_file.size()), kFileSuffix);
    std::vector<SafetensorsTensor> told;
    for (const Tensor* tensor : in_file[f]) told.push_back(*tensor);
    TESSERA_ASSIGN_OR_RETURN(
        output.header,
        SafetensorsHeaderText(told,
                              absl::StrCat(folder_.path(), "/", output.name)));
    int64_t at = static_cast<int64_t>(output.header.size());
    for (Tensor* tensor : in_file[f]) {
      tensor->layout.at = at;
      at += tensor->bytes;
    }
    output.bytes = at;
    outputs_.push_back(std::move(output));
  }
  return absl::OkStatus();
}

std::string SafetensorsExport::IndexJson() const {
  std::vector<std::string> entries;
  for (const Tensor& tensor : tensors_) {
    entries.push_back(absl::StrCat(
        "    ", QuoteJson(tensor.name), ": ",
        QuoteJson(outputs_[static_cast<size_t>(tensor.file)].name)));
  }
  std::sort(entries.begin(), entries.end());
  return absl::StrCat("{\n  \"metadata\": {\"total_size\": ", total_bytes_,
                      "},\n  \"weight_map\": {\n",
                      absl::StrJoin(entries, ",\n"), "\n  }\n}\n");
}

absl::StatusOr<File*> SafetensorsExport::Open(size_t file, bool make) {
  Output& output = outputs_[file];
  if (output.open == nullptr) {
    const std::string name = absl::StrCat(output.name, kTemporary);
    absl::StatusOr<File> open =
        make ? folder_.CreateFile(name) : folder_.OpenFileToWrite(name);
    if (!make && absl::IsNotFound(open.status())) {
      return absl::FailedPreconditionError(
          absl::StrCat(open.status().message(),
                       ", though rank 0 has made it: is the "
                       "folder on a disk of each host's own?"));
    }
    TESSERA_RETURN_IF_ERROR(open.status());
    output.open = std::make_unique<File>(*std::move(open));
  }
  return output.open.get();
}

std::string SafetensorsExport::Fingerprint() const {
  std::string text;
  for (const Tensor& tensor : tensors_) {
    absl::StrAppend(&text, tensor.name, " ", tensor.dtype_name, " ",
                    tensor.storage, "+", tensor.layout.offset, " ",
                    absl::StrJoin(tensor.sizes, ","), " ",
                    absl::StrJoin(tensor.strides, ","), " ", tensor.file, ":",
                    tensor.layout.at, "\n");
  }
  return absl::StrCat(tensors_.size(), " tensors in ", outputs_.size(),
                      " files, ", absl::Hex(Crc32c(text)));
}

absl::Status SafetensorsExport::Create() {
  for (size_t f = 0; f < outputs_.size(); ++f) {
    // The file of an interrupted export may be longer.
    TESSERA_RETURN_IF_ERROR(
        folder_.Remove(absl::StrCat(outputs_[f].name, kTemporary)));
    TESSERA_ASSIGN_OR_RETURN(File* const file, Open(f, /*make=*/true));
    TESSERA_RETURN_IF_ERROR(file->WriteAt(0, outputs_[f].header));
  }
  return absl::OkStatus();
}

absl::Status SafetensorsExport::Write(int storage, int64_t begin,
                                      absl::string_view bytes) {
  for (const size_t t : of_storage_[static_cast<size_t>(storage)]) {
    const Tensor& tensor = tensors_[t];
    if (tensor.numel == 0) continue;
    TESSERA_ASSIGN_OR_RETURN(File* const file,
                             Open(static_cast<size_t>(tensor.file)));
    TESSERA_RETURN_IF_ERROR(WriteRuns(
        tensor.layout,
        NumberCast(dtypes_[static_cast<size_t>(storage)], tensor.dtype_name),
        begin, bytes, *file));
  }
  return absl::OkStatus();
}

absl::Status SafetensorsExport::Sync() {
  for (const Output& output : outputs_) {
    if (output.open != nullptr) TESSERA_RETURN_IF_ERROR(output.open->Sync());
  }
  return absl::OkStatus();
}

void SafetensorsExport::Abandon() {
  for (const Output& output : outputs_) {
    (void)folder_.Remove(absl::StrCat(output.name, kTemporary));
  }
  (void)folder_.Remove(absl::StrCat(kIndexFile, kTemporary));
  // Files of these names are ours: either none existed, or nothing was planned.
  for (const std::string& name : renamed_) (void)folder_.Remove(name);
}

absl::Status SafetensorsExport::Commit() {
  for (const Output& output : outputs_) {
    const std::string temporary = absl::StrCat(output.name, kTemporary);
    TESSERA_ASSIGN_OR_RETURN(const File file, folder_.OpenFile(temporary));
    if (file.bytes() != output.bytes) {
      return absl::DataLossError(absl::StrCat(file.path(), ": has ",
                                              file.bytes(), " bytes, expected ",
                                              output.bytes));
    }
  }
  // All is on the disk before the first file gets its name.
  std::vector<std::string> names;
  for (const Output& output : outputs_) names.push_back(output.name);
  if (outputs_.size() > 1) {
    const std::string temporary = absl::StrCat(kIndexFile, kTemporary);
    TESSERA_RETURN_IF_ERROR(folder_.Remove(temporary));
    TESSERA_ASSIGN_OR_RETURN(const File file, folder_.CreateFile(temporary));
    TESSERA_RETURN_IF_ERROR(file.WriteAt(0, IndexJson()));
    TESSERA_RETURN_IF_ERROR(file.Sync());
    names.push_back(kIndexFile);
  }
  for (const std::string& name : names) {
    renamed_.push_back(name);  // also if an error says that it was not renamed
    TESSERA_RETURN_IF_ERROR(
        folder_.Rename(absl::StrCat(name, kTemporary), name));
  }
  return folder_.Sync();
}

}  // namespace tessera
