#include "checkpoint/format/manifest_check.h"

#include <cstdint>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "checkpoint/format/manifest.h"

namespace tessera {
namespace {

// The most elements or bytes of one storage, tensor or file, and of all
// together, with room for what is computed from it (several copies, in wider
// numbers).
constexpr int64_t kMost = int64_t{1} << 48;
constexpr int64_t kMostOfAll = int64_t{1} << 56;

// Returns the elements of the storage up to the last one that the tensor has;
// -1 if that, or their number, is out of range.
int64_t EndOf(const proto::CheckpointTensor& tensor) {
  if (tensor.sizes_size() != tensor.strides_size()) return -1;
  int64_t last = tensor.offset();
  int64_t numel = 1;  // an empty tensor is treated as if it were not empty
  bool empty = false;
  if (last < 0 || last > kMost) return -1;
  for (int d = 0; d < tensor.sizes_size(); ++d) {
    const int64_t size = tensor.sizes(d), stride = tensor.strides(d);
    if (size < 0 || stride < 0 || size > kMost || stride > kMost) return -1;
    empty |= size == 0;
    if (size > 0 &&
        (__builtin_mul_overflow(numel, size, &numel) || numel > kMost)) {
      return -1;
    }
    int64_t step = 0;
    if (size > 1 &&
        (__builtin_mul_overflow(size - 1, stride, &step) ||
         __builtin_add_overflow(last, step, &last) || last > kMost)) {
      return -1;
    }
  }
  const int64_t end = empty ? tensor.offset() : last + 1;
  return tensor.complex() ? 2 * end : end;
}

using Names = absl::flat_hash_set<absl::string_view>;

// `names` has the tensors of the storages before this one.
absl::Status CheckStorage(const proto::CheckpointStorage& storage, int number,
                          const std::string& path, Names* names) {
  if (storage.numel() < 0 || storage.numel() > kMost ||
      storage.tensors_size() == 0) {
    return DamagedError(path, absl::StrCat("storage ", number, " has ",
                                           storage.numel(), " elements and ",
                                           storage.tensors_size(), " tensors"));
  }
  for (const proto::CheckpointTensor& tensor : storage.tensors()) {
    const int64_t end = EndOf(tensor);
    if (end < 0 || end > storage.numel()) {
      return DamagedError(path,
                          absl::StrCat("tensor '", tensor.name(),
                                       "' does not lie in its storage of ",
                                       storage.numel(), " elements"));
    }
    if (!names->insert(tensor.name()).second) {
      return DamagedError(
          path, absl::StrCat("there are two tensors '", tensor.name(), "'"));
    }
  }
  Names states;
  for (const proto::CheckpointState& state : storage.states()) {
    if (DtypeBytes(state.dtype()) == 0) {
      return DamagedError(
          path,
          absl::StrCat("'", storage.tensors(0).name(), "' has '", state.name(),
                       "' of unknown dtype '", state.dtype(), "'"));
    }
    if (!states.insert(state.name()).second) {
      return DamagedError(
          path, absl::StrCat("'", storage.tensors(0).name(),
                             "' has two states '", state.name(), "'"));
    }
  }
  return absl::OkStatus();
}

absl::Status CheckFile(const proto::CheckpointFile& file, int rank,
                       int num_storages, const std::string& path) {
  if (file.bytes() < 0 || file.bytes() > kMost || file.index_bytes() < 0 ||
      file.index_bytes() > static_cast<int64_t>(kMostMessageBytes) ||
      file.index_bytes() > file.bytes() || file.index_offset() < 0 ||
      file.index_offset() != file.bytes() - file.index_bytes()) {
    return DamagedError(
        path,
        absl::StrCat("the index of data file ", rank, ", ", file.index_bytes(),
                     " bytes at byte ", file.index_offset(),
                     ", is not the end of its ", file.bytes(), " bytes"));
  }
  int64_t last = 0;
  for (int64_t step : file.storage_ranges()) {
    if (step < 0 || step > num_storages - last) {
      return DamagedError(path, absl::StrCat("data file ", rank,
                                             " has pieces of storages that the "
                                             "manifest does not have"));
    }
    last += step;
  }
  if (file.storage_ranges_size() % 2 != 0) {
    return DamagedError(path,
                        absl::StrCat("data file ", rank, " has half a range"));
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status DamagedError(const std::string& path, absl::string_view what) {
  return absl::DataLossError(absl::StrCat(path, " is damaged: ", what));
}

absl::Status CheckManifest(const proto::CheckpointManifest& manifest,
                           const std::string& path) {
  if (manifest.files_size() == 0)
    return DamagedError(path, "it names no data file");
  int64_t all = 0;  // elements, and bytes of states and files: none overflows
  Names names;
  for (int s = 0; s < manifest.storages_size() && all <= kMostOfAll; ++s) {
    const proto::CheckpointStorage& storage = manifest.storages(s);
    TESSERA_RETURN_IF_ERROR(CheckStorage(storage, s, path, &names));
    all += storage.numel();
    for (int i = 0; i < storage.states_size() && all <= kMostOfAll; ++i) {
      all += storage.numel() * DtypeBytes(storage.states(i).dtype());
    }
  }
  for (int r = 0; r < manifest.files_size() && all <= kMostOfAll; ++r) {
    TESSERA_RETURN_IF_ERROR(
        CheckFile(manifest.files(r), r, manifest.storages_size(), path));
    all += manifest.files(r).bytes();
  }
  if (all <= kMostOfAll) return absl::OkStatus();
  return DamagedError(path, "its storages have more bytes than any disk");
}

}  // namespace tessera
