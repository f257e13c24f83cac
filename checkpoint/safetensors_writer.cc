// Writes safetensors files (format: checkpoint/safetensors.h).
#include <fcntl.h>
#include <stdio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <set>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/file.h"
#include "base/json.h"
#include "base/status.h"
#include "checkpoint/safetensors.h"
#include "config/reader/utf8.h"
#include "sharding/torch/torch_scope.h"

namespace tessera {
namespace {

constexpr char kMetadata[] = "__metadata__";
constexpr size_t kHeaderAlign = 8;  // as the format's own writer does

using NamedTensor = std::pair<std::string, at::Tensor>;

absl::Status Check(const std::string& path,
                   const std::vector<NamedTensor>& tensors) {
  std::set<absl::string_view> names;
  for (const auto& [name, tensor] : tensors) {
    const auto fault = [&, &name = name](absl::string_view what) {
      return absl::InvalidArgumentError(
          absl::StrCat(path, ": tensor ", QuotedName(name), ": ", what));
    };
    if (!IsUtf8(name)) return fault("the name is not UTF-8");
    if (name == kMetadata) return fault("the format keeps that name");
    if (!names.insert(name).second) return fault("there are two of that name");
    if (!tensor.defined()) return fault("is undefined");
    if (SafetensorsDtypeName(tensor.scalar_type()).empty()) {
      return fault(absl::StrCat("the format has no dtype ",
                                c10::toString(tensor.scalar_type())));
    }
  }
  return absl::OkStatus();
}

// Length and JSON, as they begin the file.
std::string HeaderOf(const std::vector<const NamedTensor*>& tensors,
                     const std::map<std::string, std::string>& metadata) {
  std::vector<std::string> members;
  if (!metadata.empty()) {
    members.push_back(absl::StrCat(
        QuoteJson(kMetadata), ":{",
        absl::StrJoin(metadata, ",",
                      [](std::string* out, const auto& entry) {
                        absl::StrAppend(out, QuoteJson(entry.first), ":",
                                        QuoteJson(entry.second));
                      }),
        "}"));
  }
  size_t offset = 0;
  for (const NamedTensor* each : tensors) {
    const auto& [name, tensor] = *each;
    const size_t end = offset + tensor.nbytes();
    members.push_back(
        absl::StrCat(QuoteJson(name), ":{\"dtype\":\"",
                     SafetensorsDtypeName(tensor.scalar_type()),
                     "\",\"shape\":[", absl::StrJoin(tensor.sizes(), ","),
                     "],\"data_offsets\":[", offset, ",", end, "]}"));
    offset = end;
  }
  std::string json = absl::StrCat("{", absl::StrJoin(members, ","), "}");
  json.append((kHeaderAlign - json.size() % kHeaderAlign) % kHeaderAlign, ' ');
  const uint64_t length = json.size();
  return std::string(reinterpret_cast<const char*>(&length), sizeof(length)) +
         json;
}

absl::Status WriteFile(const std::string& path, const std::string& header,
                       const std::vector<const NamedTensor*>& tensors) {
  const int fd =
      open(path.c_str(), O_CREAT | O_TRUNC | O_WRONLY | O_CLOEXEC, 0644);
  if (fd < 0) return FileError(errno, path);
  const auto closer = absl::MakeCleanup([fd] { close(fd); });
  int64_t offset = static_cast<int64_t>(header.size());
  TESSERA_RETURN_IF_ERROR(WriteAt(fd, path, 0, header.data(), offset));
  for (const NamedTensor* each : tensors) {
    const at::Tensor host =
        each->second.detach().resolve_conj().resolve_neg().cpu().contiguous();
    const int64_t bytes = static_cast<int64_t>(host.nbytes());
    TESSERA_RETURN_IF_ERROR(
        WriteAt(fd, path, offset,
                static_cast<const char*>(host.const_data_ptr()), bytes));
    offset += bytes;
  }
  return fsync(fd) == 0 ? absl::OkStatus() : FileError(errno, path);
}

}  // namespace

absl::Status WriteSafetensors(
    const std::string& path, const std::vector<NamedTensor>& tensors,
    const std::map<std::string, std::string>& metadata) {
  TESSERA_RETURN_IF_ERROR(Check(path, tensors));
  for (const auto& [key, text] : metadata) {
    if (IsUtf8(key) && IsUtf8(text)) continue;
    return absl::InvalidArgumentError(
        absl::StrCat(path, ": metadata ", QuotedName(key), ": expected UTF-8"));
  }
  std::vector<const NamedTensor*> sorted;
  for (const NamedTensor& each : tensors) sorted.push_back(&each);
  std::sort(sorted.begin(), sorted.end(),
            [](const NamedTensor* a, const NamedTensor* b) {
              const size_t left = a->second.element_size();
              const size_t right = b->second.element_size();
              return left != right ? left > right : a->first < b->first;
            });
  const std::string header = HeaderOf(sorted, metadata);
  if (header.size() > static_cast<size_t>(kSafetensorsLengthBytes +
                                          kMaxSafetensorsHeaderBytes)) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, ": the names make a header of ", header.size(),
                     " bytes, expected at most ", kMaxSafetensorsHeaderBytes));
  }
  TorchScope scope;
  // Under another name until it is whole and on the disk: a reader never sees
  // half a file, and a failure leaves the file that was there.
  const std::string temporary = absl::StrCat(path, ".tmp");
  absl::Status status = WriteFile(temporary, header, sorted);
  if (status.ok() && rename(temporary.c_str(), path.c_str()) != 0) {
    status = FileError(errno, absl::StrCat(temporary, " to ", path));
  }
  if (status.ok()) return SyncFolderOf(path);
  (void)unlink(temporary.c_str());  // it may be what fills the disk
  return status;
}

}  // namespace tessera
