#include "checkpoint/checkpoint.h"

#include <algorithm>
#include <memory>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/status.h"
#include "c10/core/impl/VirtualGuardImpl.h"
#include "checkpoint/format/checkpoint_folder.h"
#include "checkpoint/format/data_file.h"
#include "checkpoint/together.h"
#include "sharding/torch/torch_scope.h"

namespace tessera {
namespace {

// More do not make a disk faster, and fewer leave it waiting for checksums.
constexpr int kReadThreads = 4;

struct DtypeName {
  const char* name;
  at::ScalarType dtype;
};
constexpr DtypeName kDtypes[] = {
    {"F32", at::kFloat},
    {"BF16", at::kBFloat16},
    {"F16", at::kHalf},
    {"F64", at::kDouble},
    {"I64", at::kLong},
    {"I32", at::kInt},
    {"I16", at::kShort},
    {"I8", at::kChar},
    {"U8", at::kByte},
    {"BOOL", at::kBool},
    {"U16", at::kUInt16},
    {"U32", at::kUInt32},
    {"U64", at::kUInt64},
    {"F8_E4M3", at::kFloat8_e4m3fn},
    {"F8_E5M2", at::kFloat8_e5m2},
};

// What a save is about on one rank.
class Writing {
 public:
  Writing(const std::string& dir, const CheckpointContent& content,
          Communicator* comm)
      : dir_(dir), content_(content), comm_(comm) {}

  absl::Status Run() {
    TESSERA_RETURN_IF_ERROR(comm_->AgreeEqual(dir_, "checkpoint's folder"));
    if (dir_.empty()) {
      return absl::InvalidArgumentError(
          "SaveCheckpoint: the folder's name is empty");
    }
    TESSERA_RETURN_IF_ERROR(
        RunTogether(comm_, "checkpoint folder", [&] { return Begin(); }));
    TESSERA_RETURN_IF_ERROR(ShareId());
    absl::Status status =
        RunTogether(comm_, "checkpoint files", [&] { return WriteFile(); });
    if (status.ok()) status = CommitFiles();
    if (!status.ok() && !committed_ && saving_ != nullptr) saving_->Abandon();
    return status;
  }

 private:
  absl::Status Begin() {
    if (comm_->rank() != 0) return absl::OkStatus();
    TESSERA_ASSIGN_OR_RETURN(Saving saving,
                             Saving::Begin(dir_, FileSystem::Real()));
    saving_ = std::make_unique<Saving>(std::move(saving));
    return absl::OkStatus();
  }

  absl::Status ShareId() {
    const uint64_t own = saving_ == nullptr ? 0 : saving_->id();
    TESSERA_ASSIGN_OR_RETURN(const std::vector<std::string> all,
                             comm_->AllGatherStrings(absl::StrFormat("%x", own),
                                                     CommTag{"checkpoint id"}));
    return absl::SimpleHexAtoi(all[0], &id_)
               ? absl::OkStatus()
               : absl::InternalError("a checkpoint's id is no number");
  }

  absl::Status WriteFile() {
    TorchScope scope;
    TESSERA_ASSIGN_OR_RETURN(const Folder folder,
                             Folder::Open(dir_, FileSystem::Real()));
    TESSERA_ASSIGN_OR_RETURN(
        DataFileWriter writer,
        DataFileWriter::Create(folder, id_, comm_->rank()));
    for (const CheckpointContent::Piece& piece : content_.pieces) {
      const at::Tensor here = piece.elements.cpu();
      TESSERA_RETURN_IF_ERROR(writer.Add(
          piece.storage, piece.state, piece.begin, here.numel(),
          absl::string_view(static_cast<const char*>(here.const_data_ptr()),
                            here.nbytes())));
    }
    for (const auto& [name, value] : content_.values) {
      writer.AddValue(name, value);
    }
    TESSERA_ASSIGN_OR_RETURN(file_, writer.Finish());
    return absl::OkStatus();
  }

  absl::Status CommitFiles() {
    TESSERA_ASSIGN_OR_RETURN(
        const std::vector<std::string> files,
        comm_->AllGatherStrings(file_.SerializeAsString(),
                                CommTag{"checkpoint manifest"}));
    return RunTogether(comm_, "checkpoint commit", [&]() -> absl::Status {
      if (saving_ == nullptr) return absl::OkStatus();
      proto::CheckpointManifest manifest = content_.head;
      manifest.set_format_version(kCheckpointFormat);
      manifest.set_id(id_);
      for (const std::string& file : files) {
        manifest.add_files()->ParseFromString(file);
      }
      const absl::Status status = saving_->Commit(manifest, &committed_);
      return committed_ ? Annotate(status,
                                   "the new checkpoint may be in place "
                                   "already, and may not outlast a power "
                                   "failure")
                        : status;
    });
  }

  const std::string& dir_;
  const CheckpointContent& content_;
  Communicator* const comm_;
  std::unique_ptr<Saving> saving_;  // of rank 0 alone
  uint64_t id_ = 0;
  proto::CheckpointFile file_;
  bool committed_ = false;
};

}  // namespace

absl::Status WriteCheckpoint(const std::string& dir,
                             const CheckpointContent& content,
                             Communicator* comm) {
  // They are read on another thread, which has another current stream.
  for (const CheckpointContent::Piece& piece : content.pieces) {
    const at::Device device = piece.elements.device();
    if (device.is_cpu()) continue;
    c10::impl::VirtualGuardImpl(device.type())
        .synchronizeDevice(device.index());
    break;
  }
  return Writing(dir, content, comm).Run();
}

absl::StatusOr<CheckpointReader> OpenCheckpoint(const std::string& dir,
                                                Communicator* comm) {
  absl::StatusOr<CheckpointReader> reader = absl::UnknownError("not opened");
  TESSERA_RETURN_IF_ERROR(
      RunTogether(comm, "LoadCheckpoint", [&]() -> absl::Status {
        reader = CheckpointReader::Open(dir, FileSystem::Real());
        return reader.status();
      }));
  // It may have several paths; and of one that is replaced meanwhile some ranks
  // may have found the next.
  TESSERA_ASSIGN_OR_RETURN(
      const std::vector<std::string> ids,
      comm->AllGatherStrings(absl::StrFormat("%x", reader->manifest().id()),
                             CommTag{"checkpoint id"}));
  if (std::count(ids.begin(), ids.end(), ids[0]) !=
      static_cast<int64_t>(ids.size())) {
    TESSERA_RETURN_IF_ERROR(comm->AgreeEqual(dir, "checkpoint's folder"));
    return absl::AbortedError(absl::StrCat(
        dir,
        ": another checkpoint took the place of this one while it was "
        "opened, or it is not one folder; load again"));
  }
  return reader;
}

absl::Status ReadCheckpoint(CheckpointReader* reader,
                            absl::Span<const WantedElements> wanted,
                            Communicator* comm,
                            std::vector<proto::CheckpointValue>* values) {
  return RunTogether(comm, "LoadCheckpoint", [&]() -> absl::Status {
    TESSERA_RETURN_IF_ERROR(reader->Read(wanted, kReadThreads));
    TESSERA_ASSIGN_OR_RETURN(
        *values,
        reader->ValuesOf(comm->rank() % reader->manifest().files_size()));
    return absl::OkStatus();
  });
}

std::string CheckpointDtype(at::ScalarType dtype) {
  for (const DtypeName& known : kDtypes) {
    if (known.dtype == dtype) return known.name;
  }
  return "";
}

at::ScalarType DtypeOfCheckpoint(const std::string& dtype) {
  for (const DtypeName& known : kDtypes) {
    if (dtype == known.name) return known.dtype;
  }
  return at::ScalarType::Undefined;
}

}  // namespace tessera
