#include "checkpoint/exchange/safetensors_files.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <map>
#include <system_error>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "base/crc32c.h"
#include "base/file.h"
#include "base/status.h"
#include "config/reader/json_reader.h"

namespace tessera {
namespace {

constexpr char kIndexName[] = "model.safetensors.index.json";
constexpr char kFileName[] = "model.safetensors";
constexpr char kSuffix[] = ".safetensors";
// So many bytes at the beginning and at the end of each tensor are compared:
// other weights differ there, too.
constexpr int64_t kSampleBytes = 2048;

// The header's length and the elements are used as they lie in the file.
static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__);

// Reads the JSON of a file of `file_bytes` bytes.
absl::StatusOr<std::string> ReadHeader(int fd, int64_t file_bytes,
                                       const std::string& path) {
  if (file_bytes < kSafetensorsLengthBytes) {
    return absl::DataLossError(
        absl::StrCat(path, ": is not a safetensors file: expected at least ",
                     kSafetensorsLengthBytes, " bytes, got ", file_bytes));
  }
  uint64_t length = 0;
  TESSERA_RETURN_IF_ERROR(ReadAt(fd, path, 0, reinterpret_cast<char*>(&length),
                                 kSafetensorsLengthBytes));
  if (length > static_cast<uint64_t>(kMaxSafetensorsHeaderBytes)) {
    return absl::DataLossError(absl::StrCat(
        path, ": is not a safetensors file: expected a header of at most ",
        kMaxSafetensorsHeaderBytes, " bytes, got ", length));
  }
  const int64_t header_bytes = static_cast<int64_t>(length);
  if (header_bytes > file_bytes - kSafetensorsLengthBytes) {
    return absl::DataLossError(
        absl::StrCat(path, ": expected a header of ", header_bytes,
                     " bytes, got ", file_bytes - kSafetensorsLengthBytes,
                     "; the file is truncated, or no safetensors file"));
  }
  std::string json(static_cast<size_t>(header_bytes), '\0');
  TESSERA_RETURN_IF_ERROR(
      ReadAt(fd, path, kSafetensorsLengthBytes, json.data(), header_bytes));
  return json;
}

// Returns the file that stands for the folder: the index, or its only file.
absl::StatusOr<std::string> FindInFolder(const std::string& folder) {
  std::vector<std::string> found;
  std::error_code error;
  std::filesystem::directory_iterator entries(folder, error);
  while (!error && entries != std::filesystem::directory_iterator()) {
    std::string name = entries->path().filename().string();
    if (name == kIndexName || absl::EndsWith(name, kSuffix)) {
      found.push_back(std::move(name));
    }
    entries.increment(error);
  }
  if (error) return FileError(error.value(), folder);
  const auto has = [&](absl::string_view name) {
    return std::find(found.begin(), found.end(), name) != found.end();
  };
  std::sort(found.begin(), found.end());
  if (has(kIndexName)) return absl::StrCat(folder, "/", kIndexName);
  if (has(kFileName)) return absl::StrCat(folder, "/", kFileName);
  if (found.size() == 1) return absl::StrCat(folder, "/", found[0]);
  return absl::NotFoundError(
      absl::StrCat(folder, ": expected ", kIndexName, ", ", kFileName,
                   " or one file *", kSuffix, " in it, got ",
                   found.empty() ? "none" : absl::StrJoin(found, ", "),
                   found.empty() ? "" : "; name the one that is meant"));
}

bool IsPlainFileName(absl::string_view name) {
  return !name.empty() && name != "." && name != ".." &&
         !absl::StrContains(name, '/') && !absl::StrContains(name, '\0');
}

// Maps the name of a tensor to that of its file.
using WeightMap = std::map<std::string, std::string>;
absl::StatusOr<WeightMap> ReadWeightMap(const std::string& path) {
  TESSERA_ASSIGN_OR_RETURN(const std::string text,
                           ReadRegularFile(path, kMaxSafetensorsHeaderBytes));
  JsonLimits limits;
  limits.max_bytes = kMaxSafetensorsHeaderBytes;
  limits.max_values = kMaxSafetensorsHeaderValues;
  const auto root = ReadJson(text, path, limits);
  if (!root.ok()) return absl::DataLossError(root.status().message());
  const JsonValue* map =
      root->kind == JsonKind::kObject ? root->Find("weight_map") : nullptr;
  if (map == nullptr || map->kind != JsonKind::kObject) {
    return absl::DataLossError(absl::StrCat(
        path, ": expected an object with an object \"weight_map\""));
  }
  WeightMap files;
  for (const JsonMember& member : map->members) {
    if (member.value.kind != JsonKind::kString ||
        !IsPlainFileName(member.value.text)) {
      return absl::DataLossError(
          absl::StrCat(path, ": weight_map: ", QuotedName(member.key),
                       ": expected the name of a file in the same folder, got ",
                       member.value.kind == JsonKind::kString
                           ? QuotedName(member.value.text)
                           : JsonKindName(member.value.kind)));
    }
    files.emplace(member.key, member.value.text);
  }
  return files;
}

}  // namespace

absl::StatusOr<std::unique_ptr<SafetensorsFiles>> SafetensorsFiles::Open(
    const std::string& path) {
  std::unique_ptr<SafetensorsFiles> set(new SafetensorsFiles(path));
  std::string file = path;
  std::error_code error;
  if (std::filesystem::is_directory(path, error)) {
    TESSERA_ASSIGN_OR_RETURN(file, FindInFolder(path));
  }
  TESSERA_RETURN_IF_ERROR(absl::EndsWith(file, ".json") ? set->OpenIndex(file)
                                                        : set->AddFile(file));
  set->Index();
  return set;
}

SafetensorsFiles::~SafetensorsFiles() {
  for (const File& file : files_) close(file.fd);
}

absl::Status SafetensorsFiles::AddFile(const std::string& path) {
  // A pipe would make open() wait for a writer.
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) return FileError(errno, path);
  files_.push_back({path, fd, {}, 0});
  File& file = files_.back();
  if (fstat(fd, &file.opened) != 0) return FileError(errno, path);
  if (!S_ISREG(file.opened.st_mode)) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, ": expected a file, got a folder or a device"));
  }
  const int64_t file_bytes = file.opened.st_size;
  TESSERA_ASSIGN_OR_RETURN(const std::string json,
                           ReadHeader(fd, file_bytes, path));
  file.header_crc = Crc32c(json);
  TESSERA_ASSIGN_OR_RETURN(SafetensorsHeader header,
                           ParseSafetensorsHeader(json, file_bytes, path));
  for (SafetensorsTensor& tensor : header.tensors) {
    tensor.file = static_cast<int>(files_.size()) - 1;
    tensors_.push_back(std::move(tensor));
  }
  for (auto& entry : header.metadata) metadata_.push_back(std::move(entry));
  return absl::OkStatus();
}

absl::Status SafetensorsFiles::OpenIndex(const std::string& path) {
  TESSERA_ASSIGN_OR_RETURN(WeightMap expected, ReadWeightMap(path));
  const auto folder = std::filesystem::path(path).parent_path();
  std::map<std::string, int> opened;
  for (const auto& [tensor, name] : expected) {
    if (!opened.try_emplace(name, static_cast<int>(files_.size())).second) {
      continue;
    }
    const absl::Status added = AddFile((folder / name).string());
    if (added.ok()) continue;
    return absl::Status(added.code(), absl::StrCat(added.message(), " (", path,
                                                   " names it for ", "tensor ",
                                                   QuotedName(tensor), ")"));
  }
  for (const SafetensorsTensor& tensor : tensors_) {
    const auto named = expected.find(tensor.name);
    if (named != expected.end() && opened[named->second] == tensor.file) {
      expected.erase(named);
      continue;
    }
    return absl::DataLossError(
        absl::StrCat(Describe(tensor), ": expected none of that name, since ",
                     path, " does not place it there"));
  }
  if (expected.empty()) return absl::OkStatus();
  return absl::DataLossError(absl::StrCat(
      path, ": places tensor ", QuotedName(expected.begin()->first), " in ",
      expected.begin()->second, ", which does not have it"));
}

void SafetensorsFiles::Index() {
  std::sort(tensors_.begin(), tensors_.end(),
            [](const SafetensorsTensor& a, const SafetensorsTensor& b) {
              return a.name < b.name;
            });
  for (size_t i = 0; i < tensors_.size(); ++i) places_[tensors_[i].name] = i;
}

const SafetensorsTensor* SafetensorsFiles::Find(absl::string_view name) const {
  const auto found = places_.find(name);
  return found == places_.end() ? nullptr : &tensors_[found->second];
}

std::string SafetensorsFiles::Describe(const SafetensorsTensor& tensor) const {
  return absl::StrCat(files_[static_cast<size_t>(tensor.file)].path,
                      ": tensor ", QuotedName(tensor.name));
}

absl::Status SafetensorsFiles::ReadBytes(const SafetensorsTensor& tensor,
                                         int64_t begin, char* to,
                                         int64_t bytes) const {
  return ReadAt(files_[static_cast<size_t>(tensor.file)].fd, Describe(tensor),
                tensor.offset + begin, to, bytes);
}

absl::StatusOr<std::string> SafetensorsFiles::Fingerprint() const {
  int64_t bytes = 0;
  uint32_t crc = 0;
  for (const File& file : files_) {
    bytes += file.opened.st_size;
    crc = ExtendCrc32c(
        crc, absl::StrCat(file.opened.st_size, " ", file.header_crc, "\n"));
  }
  std::string sample;
  for (const SafetensorsTensor& tensor : tensors_) {
    const int64_t n = std::min(tensor.bytes, kSampleBytes);
    sample.resize(static_cast<size_t>(n));
    for (const int64_t begin : {int64_t{0}, tensor.bytes - n}) {
      TESSERA_RETURN_IF_ERROR(ReadBytes(tensor, begin, sample.data(), n));
      crc = ExtendCrc32c(crc, sample);
      if (n == tensor.bytes) break;
    }
  }
  return absl::StrFormat("%d bytes in %d files, CRC32C %08x", bytes,
                         static_cast<int>(files_.size()), crc);
}

absl::Status SafetensorsFiles::CheckUnchanged() const {
  for (const File& file : files_) {
    struct stat now;
    if (fstat(file.fd, &now) != 0) return FileError(errno, file.path);
    const struct stat& then = file.opened;
    if (now.st_size == then.st_size &&
        now.st_mtim.tv_sec == then.st_mtim.tv_sec &&
        now.st_mtim.tv_nsec == then.st_mtim.tv_nsec) {
      continue;
    }
    return absl::AbortedError(absl::StrCat(
        file.path, ": was written to since it was opened (expected ",
        then.st_size, " bytes of the same time, got ", now.st_size,
        "); load again when nothing writes to it"));
  }
  return absl::OkStatus();
}

}  // namespace tessera
