// Implements ImportSafetensors of checkpoint/exchange/rewrite.h.
#include <algorithm>
#include <cstring>
#include <map>
#include <new>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "checkpoint/exchange/rewrite.h"
#include "checkpoint/exchange/safetensors_files.h"
#include "checkpoint/format/checkpoint_folder.h"
#include "checkpoint/format/data_file.h"
#include "checkpoint/format/manifest.h"

namespace tessera {
namespace {

constexpr int64_t kHeldBytes = 16 << 20;  // at a time, unless a row is larger

// One of their tensors that becomes a storage.
struct Source {
  const SafetensorsTensor* tensor = nullptr;
  bool transposed = false;
  int64_t item_bytes = 0;  // of a number
};

class Importing {
 public:
  Importing(const SafetensorsFiles& from, const NameMap& names, Saving* saving,
            const RewriteProgress& progress)
      : from_(from), names_(names), saving_(*saving), progress_(progress) {}

  absl::Status Run(bool* committed) {
    TESSERA_RETURN_IF_ERROR(Plan());
    manifest_.set_format_version(kCheckpointFormat);
    manifest_.set_id(saving_.id());
    manifest_.set_step(0);
    TESSERA_ASSIGN_OR_RETURN(*manifest_.add_files(), WriteFile());
    return saving_.Commit(manifest_, committed);
  }

 private:
  absl::Status Plan() {
    std::map<std::string, const SafetensorsTensor*> by_name;  // by our name
    for (const SafetensorsTensor& tensor : from_.tensors()) {
      const NameMap::Name ours = names_.Ours(tensor.name);
      if (ours.name.empty()) {
        return absl::InvalidArgumentError(
            absl::StrCat(from_.Describe(tensor),
                         ": the rules do not say what it is called here"));
      }
      const auto [it, is_new] = by_name.emplace(ours.name, &tensor);
      if (!is_new) {
        return absl::InvalidArgumentError(absl::StrCat(
            from_.Describe(tensor), " and ", QuotedName(it->second->name),
            " are both ", QuotedName(ours.name), " by the rules"));
      }
      TESSERA_RETURN_IF_ERROR(Add(tensor, ours));
    }
    return absl::OkStatus();
  }

  absl::Status Add(const SafetensorsTensor& tensor, const NameMap::Name& ours) {
    const bool complex = tensor.dtype_name == "C64";
    const std::string dtype = complex ? "F32" : tensor.dtype_name;
    const int64_t item_bytes = DtypeBytes(dtype);
    if (item_bytes == 0) {
      return absl::UnimplementedError(
          absl::StrCat(from_.Describe(tensor), ": dtype ", tensor.dtype_name,
                       " is none that checkpoints have"));
    }
    std::vector<int64_t> sizes = tensor.sizes;
    if (ours.transposed && (sizes.size() != 2 || complex)) {
      return absl::InvalidArgumentError(
          absl::StrCat(from_.Describe(tensor),
                       ": is to be transposed and is no matrix of reals"));
    }
    if (ours.transposed) std::reverse(sizes.begin(), sizes.end());
    proto::CheckpointStorage* const storage = manifest_.add_storages();
    storage->set_numel(tensor.numel * (complex ? 2 : 1));
    proto::CheckpointTensor* const added = storage->add_tensors();
    added->set_name(ours.name);
    added->set_offset(0);
    if (complex) added->set_complex(true);
    int64_t stride = std::max<int64_t>(tensor.numel, 1);
    for (int64_t size : sizes) {
      stride /= std::max<int64_t>(size, 1);
      added->add_sizes(size);
      added->add_strides(tensor.numel == 0 ? 1 : stride);
    }
    proto::CheckpointState* const state = storage->add_states();
    state->set_name("value");
    state->set_dtype(dtype);
    total_ += tensor.bytes;
    sources_.push_back({&tensor, ours.transposed, item_bytes});
    return absl::OkStatus();
  }

  absl::StatusOr<proto::CheckpointFile> WriteFile() try {
    TESSERA_ASSIGN_OR_RETURN(
        DataFileWriter writer,
        DataFileWriter::Create(saving_.folder(), saving_.id(), 0));
    for (size_t s = 0; s < sources_.size(); ++s) {
      const Source& source = sources_[s];
      const int64_t bytes = source.tensor->bytes;
      if (bytes == 0) continue;
      TESSERA_RETURN_IF_ERROR(writer.BeginPiece(
          static_cast<int>(s), 0, 0, bytes / source.item_bytes, bytes));
      TESSERA_RETURN_IF_ERROR(source.transposed ? AddTransposed(source, &writer)
                                                : AddPlain(source, &writer));
    }
    return writer.Finish();
  } catch (const std::bad_alloc&) {
    return absl::ResourceExhaustedError(
        absl::StrCat(from_.path(), ": no memory to read it"));
  }

  absl::Status AddPlain(const Source& source, DataFileWriter* writer) {
    const int64_t bytes = source.tensor->bytes;
    std::string part;
    for (int64_t at = 0; at < bytes; at += kPartBytes) {
      part.resize(static_cast<size_t>(std::min(kPartBytes, bytes - at)));
      TESSERA_RETURN_IF_ERROR(from_.ReadBytes(
          *source.tensor, at, part.data(), static_cast<int64_t>(part.size())));
      TESSERA_RETURN_IF_ERROR(Put(part, writer));
    }
    return absl::OkStatus();
  }

  // Adds a transposed matrix. Theirs is [rows, columns], ours has the columns
  // one after the other: as many at a time as fit in memory, a piece of each
  // row.
  absl::Status AddTransposed(const Source& source, DataFileWriter* writer) {
    const int64_t rows = source.tensor->sizes[0];
    const int64_t columns = source.tensor->sizes[1];
    const int64_t item = source.item_bytes;
    const int64_t at_once = std::clamp<int64_t>(
        kHeldBytes / std::max<int64_t>(rows * item, 1), 1, columns);
    std::string row(static_cast<size_t>(at_once * item), '\0');
    std::string held, rest;  // whole blocks go to the file
    for (int64_t first = 0; first < columns; first += at_once) {
      const int64_t n = std::min(at_once, columns - first);
      held.resize(static_cast<size_t>(n * rows * item));
      for (int64_t r = 0; r < rows; ++r) {
        TESSERA_RETURN_IF_ERROR(from_.ReadBytes(*source.tensor,
                                                (r * columns + first) * item,
                                                row.data(), n * item));
        for (int64_t c = 0; c < n; ++c) {
          std::memcpy(&held[static_cast<size_t>((c * rows + r) * item)],
                      &row[static_cast<size_t>(c * item)],
                      static_cast<size_t>(item));
        }
      }
      rest += held;
      const size_t whole = first + n == columns
                               ? rest.size()
                               : rest.size() / kBlockBytes * kBlockBytes;
      TESSERA_RETURN_IF_ERROR(
          Put(absl::string_view(rest).substr(0, whole), writer));
      rest.erase(0, whole);
    }
    return absl::OkStatus();
  }

  absl::Status Put(absl::string_view bytes, DataFileWriter* writer) {
    TESSERA_RETURN_IF_ERROR(writer->AddPart(bytes));
    done_ += static_cast<int64_t>(bytes.size());
    if (progress_) progress_(done_, total_);
    return absl::OkStatus();
  }

  const SafetensorsFiles& from_;
  const NameMap& names_;
  Saving& saving_;
  const RewriteProgress& progress_;
  proto::CheckpointManifest manifest_;
  std::vector<Source> sources_;  // by storage
  int64_t done_ = 0, total_ = 0;
};

}  // namespace

absl::Status ImportSafetensors(const std::string& from, const std::string& to,
                               const NameMap& names,
                               const RewriteProgress& progress,
                               FileSystem* files) {
  TESSERA_ASSIGN_OR_RETURN(const auto source, SafetensorsFiles::Open(from));
  TESSERA_ASSIGN_OR_RETURN(Saving saving, Saving::Begin(to, files));
  bool committed = false;
  const absl::Status status =
      Importing(*source, names, &saving, progress).Run(&committed);
  if (!status.ok() && !committed) saving.Abandon();
  return status;
}

}  // namespace tessera
