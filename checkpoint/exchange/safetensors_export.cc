// How a range of a storage finds its places. A tensor is sizes and strides over
// its storage; its file has it in row-major order. Dims are walked in that
// order, each only as far as the range reaches, so the innermost gives runs:
// numbers that follow each other in the file, and lie a stride apart in memory.
// A row-major tensor is one run; of a transposed matrix there is one for each
// row of the file.
#include "checkpoint/exchange/safetensors_export.h"

#include <algorithm>
#include <set>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "base/json.h"
#include "base/status.h"
#include "checkpoint/disk/crc32c.h"
#include "checkpoint/exchange/number_cast.h"
#include "checkpoint/format/manifest.h"

namespace tessera {
namespace {

constexpr char kSuffix[] = ".safetensors";
constexpr char kTemporary[] = ".tmp";
constexpr char kIndexName[] = "model.safetensors.index.json";
constexpr size_t kHeaderAlign = 8;
constexpr size_t kBufferBytes = 4 << 20;

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace

// The runs of one tensor in a range of its storage, gathered into writes.
class SafetensorsExport::Runs {
 public:
  Runs(const Tensor& tensor, const NumberCast& cast, int64_t begin,
       absl::string_view bytes, const File* file)
      : tensor_(tensor),
        cast_(cast),
        to_bytes_(DtypeBytes(tensor.dtype)),
        begin_(begin),
        end_(begin + static_cast<int64_t>(bytes.size()) / cast.from_bytes()),
        bytes_(bytes),
        file_(file) {}

  absl::Status Write() {
    TESSERA_RETURN_IF_ERROR(Walk(0, tensor_.offset, 0));
    return Flush();
  }

 private:
  // Dim `d` and those after it, from number `base` of the storage on, which is
  // element `out` of the file's.
  absl::Status Walk(size_t d, int64_t base, int64_t out) {
    const Dim& dim = tensor_.dims[d];
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
      if (stride == 1 && cast_.same()) {
        buffer_.append(at, static_cast<size_t>(some * cast_.from_bytes()));
      } else {
        for (int64_t i = 0; i < some; ++i) {
          cast_.Append(at + i * stride * cast_.from_bytes(), &buffer_);
        }
      }
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
        file_->WriteAt(tensor_.at + buffer_at_ * to_bytes_, buffer_);
    buffer_.clear();
    return status;
  }

  const Tensor& tensor_;
  const NumberCast& cast_;
  const int64_t to_bytes_;
  const int64_t begin_, end_;  // numbers
  const absl::string_view bytes_;
  const File* const file_;
  std::string buffer_;
  int64_t buffer_at_ = 0, next_ = 0;  // elements of the tensor
};

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
    if (!absl::EndsWith(name, kSuffix) && name != kIndexName) continue;
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
    for (int t = 0; t < storage.tensors_size(); ++t) {
      const proto::CheckpointTensor& tensor = storage.tensors(t);
      const auto same = [&](const proto::CheckpointTensor& other) {
        return other.offset() == tensor.offset() &&
               !options_.names.Theirs(other.name()).name.empty() &&
               std::equal(other.sizes().begin(), other.sizes().end(),
                          tensor.sizes().begin(), tensor.sizes().end()) &&
               std::equal(other.strides().begin(), other.strides().end(),
                          tensor.strides().begin(), tensor.strides().end());
      };
      if (std::any_of(storage.tensors().begin(), storage.tensors().begin() + t,
                      same)) {
        continue;
      }
      const size_t before = tensors_.size();
      TESSERA_RETURN_IF_ERROR(AddTensor(s, tensor));
      if (tensors_.size() > before &&
          !names.insert(tensors_.back().name).second) {
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
  if (name.name.empty()) return absl::OkStatus();
  if (tensor.complex()) {
    return absl::UnimplementedError(
        absl::StrCat("'", tensor.name(), "' holds complex numbers"));
  }
  Tensor added;
  added.name = name.name;
  added.storage = storage;
  added.offset = tensor.offset();
  added.dtype = dtypes_.back();
  if (NumberCast::IsFloat(added.dtype) && !options_.dtype.empty()) {
    added.dtype = options_.dtype;
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
  for (size_t d = 0; d < added.sizes.size(); ++d) {
    if (added.sizes[d] == 1) continue;
    const Dim dim = {added.sizes[d], added.strides[d]};
    if (!added.dims.empty() &&
        added.dims.back().stride == dim.size * dim.stride) {
      added.dims.back() = {added.dims.back().size * dim.size, dim.stride};
    } else {
      added.dims.push_back(dim);
    }
  }
  if (added.dims.empty()) added.dims.push_back({1, 1});
  of_storage_[static_cast<size_t>(storage)].push_back(tensors_.size());
  tensors_.push_back(std::move(added));
  return absl::OkStatus();
}

// In the order of the model, except that wider numbers come first in a file, so
// that all are aligned.
absl::Status SafetensorsExport::Arrange() {
  const auto bytes_of = [](const Tensor& tensor) {
    int64_t bytes = DtypeBytes(tensor.dtype);
    for (const int64_t size : tensor.sizes) bytes *= size;
    return bytes;
  };
  std::vector<std::vector<const Tensor*>> in_file(1);
  int64_t filled = 0;
  for (Tensor& tensor : tensors_) {
    const int64_t bytes = bytes_of(tensor);
    if (filled > 0 && filled + bytes > options_.max_file_bytes) {
      in_file.emplace_back();
      filled = 0;
    }
    filled += bytes;
    total_bytes_ += bytes;
    tensor.file = in_file.size() - 1;
    in_file.back().push_back(&tensor);
  }
  for (size_t f = 0; f < in_file.size(); ++f) {
    std::stable_sort(in_file[f].begin(), in_file[f].end(),
                     [](const Tensor* a, const Tensor* b) {
                       return DtypeBytes(a->dtype) > DtypeBytes(b->dtype);
                     });
    Output output;
    output.name =
        in_file.size() == 1
            ? absl::StrCat("model", kSuffix)
            : absl::StrFormat("model-%05d-of-%05d%s", static_cast<int>(f + 1),
                              static_cast<int>(in_file.size()), kSuffix);
    output.header = HeaderOf(in_file[f]);
    int64_t at = static_cast<int64_t>(output.header.size());
    for (const Tensor* tensor : in_file[f]) {
      tensors_[static_cast<size_t>(tensor - tensors_.data())].at = at;
      at += bytes_of(*tensor);
    }
    output.bytes = at;
    outputs_.push_back(std::move(output));
  }
  return absl::OkStatus();
}

std::string SafetensorsExport::HeaderOf(
    const std::vector<const Tensor*>& tensors) const {
  std::string json = R"({"__metadata__":{"format":"pt"})";
  int64_t at = 0;
  for (const Tensor* tensor : tensors) {
    int64_t end = DtypeBytes(tensor->dtype);
    for (const int64_t size : tensor->sizes) end *= size;
    end += at;
    absl::StrAppend(&json, ",", QuoteJson(tensor->name), ":{\"dtype\":\"",
                    tensor->dtype, "\",\"shape\":[",
                    absl::StrJoin(tensor->sizes, ","), "],\"data_offsets\":[",
                    at, ",", end, "]}");
    at = end;
  }
  json += '}';
  json.append((kHeaderAlign - json.size() % kHeaderAlign) % kHeaderAlign, ' ');
  const uint64_t length = json.size();
  return std::string(reinterpret_cast<const char*>(&length), sizeof(length)) +
         json;
}

std::string SafetensorsExport::IndexJson() const {
  std::vector<std::string> entries;
  for (const Tensor& tensor : tensors_) {
    entries.push_back(absl::StrCat("    ", QuoteJson(tensor.name), ": ",
                                   QuoteJson(outputs_[tensor.file].name)));
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
    absl::StrAppend(&text, tensor.name, " ", tensor.dtype, " ", tensor.storage,
                    "+", tensor.offset, " ", absl::StrJoin(tensor.sizes, ","),
                    " ", absl::StrJoin(tensor.strides, ","), " ", tensor.file,
                    ":", tensor.at, "\n");
  }
  return absl::StrCat(tensors_.size(), " tensors in ", outputs_.size(),
                      " files, ", absl::Hex(Crc32c(text)));
}

absl::Status SafetensorsExport::Create() {
  for (size_t f = 0; f < outputs_.size(); ++f) {
    // What an interrupted export left may be longer.
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
    if (std::any_of(tensor.sizes.begin(), tensor.sizes.end(),
                    [](int64_t size) { return size == 0; })) {
      continue;
    }
    const NumberCast cast(dtypes_[static_cast<size_t>(storage)], tensor.dtype);
    TESSERA_ASSIGN_OR_RETURN(File* const file, Open(tensor.file));
    TESSERA_RETURN_IF_ERROR(Runs(tensor, cast, begin, bytes, file).Write());
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
  for (const Output& output : outputs_) {
    TESSERA_RETURN_IF_ERROR(
        folder_.Rename(absl::StrCat(output.name, kTemporary), output.name));
  }
  if (outputs_.size() > 1) {
    const std::string temporary = absl::StrCat(kIndexName, kTemporary);
    TESSERA_RETURN_IF_ERROR(folder_.Remove(temporary));
    {
      TESSERA_ASSIGN_OR_RETURN(const File file, folder_.CreateFile(temporary));
      TESSERA_RETURN_IF_ERROR(file.WriteAt(0, IndexJson()));
      TESSERA_RETURN_IF_ERROR(file.Sync());
    }
    TESSERA_RETURN_IF_ERROR(folder_.Rename(temporary, kIndexName));
  }
  return folder_.Sync();
}

}  // namespace tessera
