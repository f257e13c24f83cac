#include "checkpoint/checkpoint.h"

#include <fcntl.h>
#include <stdio.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <regex>
#include <system_error>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/bits.h"
#include "base/file.h"
#include "base/status.h"
#include "config/reader/proto_reader.h"
#include "google/protobuf/text_format.h"

namespace tessera {
namespace {

constexpr int kFormatVersion = 0;
constexpr int64_t kChunkAlign = 4096;
constexpr char kManifestName[] = "manifest.textproto";

std::string RankFileName(int rank) {
  return absl::StrFormat("rank-%05d.bin", rank);
}

bool IsRankFileName(const std::string& name) {
  return std::regex_match(name, std::regex("rank-[0-9]{5,}\\.bin"));
}

// A rank's file, open for reading.
struct RankFile {
  std::string path;
  int fd = -1;
  int64_t bytes = 0;

  ~RankFile() {
    if (fd >= 0) close(fd);
  }
  absl::Status Open(const std::string& dir, const std::string& name) {
    path = absl::StrCat(dir, "/", name);
    fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
    struct stat info;
    if (fd < 0 || fstat(fd, &info) != 0) return FileError(errno, path);
    bytes = info.st_size;
    return absl::OkStatus();
  }
  // A chunk's bytes; its place comes from a manifest, so it may be anything.
  absl::StatusOr<std::string> Read(const proto::CheckpointChunk& chunk) const {
    const int64_t offset = chunk.offset_bytes();
    const int64_t size = chunk.bytes();
    if (size < 0 || size > bytes || offset < 0 || offset > bytes - size) {
      return absl::DataLossError(absl::StrCat(
          path, ": chunk '", chunk.name(), "' of ", size, " bytes at byte ",
          offset, " ends beyond the file's ", bytes, " bytes"));
    }
    std::string text(static_cast<size_t>(size), '\0');
    TESSERA_RETURN_IF_ERROR(ReadAt(fd, path, offset, text.data(), size));
    return text;
  }
};

uint64_t FingerprintOf(const std::string& bytes) {
  return Fingerprint(bytes.data(), static_cast<int64_t>(bytes.size()));
}

// Of everything but the fingerprint itself.
uint64_t FingerprintOf(proto::CheckpointManifest manifest) {
  manifest.clear_fingerprint();
  return FingerprintOf(manifest.SerializeAsString());
}

// Writes the parts one after another; returns what the manifest says of them.
absl::StatusOr<proto::CheckpointFile> WriteRankFile(
    const std::string& dir, int rank, absl::Span<const CheckpointPart> parts) {
  proto::CheckpointFile file;
  file.set_name(RankFileName(rank));
  const std::string path = absl::StrCat(dir, "/", file.name());
  const int fd =
      open(path.c_str(), O_CREAT | O_TRUNC | O_WRONLY | O_CLOEXEC, 0644);
  if (fd < 0) return FileError(errno, path);
  absl::Cleanup close_fd = [fd] { close(fd); };
  int64_t offset = 0;
  for (const CheckpointPart& part : parts) {
    const at::Tensor bytes = part.bytes.cpu().contiguous();
    const char* data = static_cast<const char*>(bytes.const_data_ptr());
    proto::CheckpointChunk* chunk = file.add_chunks();
    chunk->set_name(part.name);
    chunk->set_offset_bytes(offset);
    chunk->set_bytes(bytes.numel());
    chunk->set_fingerprint(Fingerprint(data, bytes.numel()));
    TESSERA_RETURN_IF_ERROR(WriteAt(fd, path, offset, data, bytes.numel()));
    offset += (bytes.numel() + kChunkAlign - 1) / kChunkAlign * kChunkAlign;
  }
  if (ftruncate(fd, offset) != 0 || fsync(fd) != 0) {
    return FileError(errno, path);
  }
  file.set_bytes(offset);
  return file;
}

// Whether `dir` may be replaced: it is not there, or a folder with nothing in
// it but a checkpoint, whole or not. Saving removes all of it in the end, and a
// mistyped path must not cost a user's other files.
absl::Status CheckReplaceable(const std::string& dir) {
  std::error_code error;
  const auto kind = std::filesystem::symlink_status(dir, error).type();
  if (kind == std::filesystem::file_type::not_found) return absl::OkStatus();
  if (error) return FileError(error.value(), dir);
  if (kind != std::filesystem::file_type::directory) {
    return absl::AlreadyExistsError(
        absl::StrCat(dir, ": is no folder; a checkpoint is one"));
  }
  std::filesystem::directory_iterator entries(dir, error);
  while (!error && entries != std::filesystem::directory_iterator()) {
    const std::string name = entries->path().filename().string();
    if (name != kManifestName && !IsRankFileName(name)) {
      return absl::AlreadyExistsError(absl::StrCat(
          dir, ": holds '", name,
          "', which is no part of a checkpoint; saving replaces the whole "
          "folder, so give it a new or empty one"));
    }
    entries.increment(error);
  }
  return error ? FileError(error.value(), dir) : absl::OkStatus();
}

absl::Status MakeTemporary(const std::string& dir, const std::string& tmp) {
  TESSERA_RETURN_IF_ERROR(CheckReplaceable(dir));
  TESSERA_RETURN_IF_ERROR(CheckReplaceable(tmp));
  std::error_code error;
  std::filesystem::remove_all(tmp, error);
  std::filesystem::create_directories(tmp, error);
  return error ? FileError(error.value(), tmp) : absl::OkStatus();
}

// Why in this order. A rank, or the machine, may stop at any point, and what is
// then found under `dir` must be a whole checkpoint, the old or the new one.
//  - All ranks agree that their files are written and synced before rank 0
//    writes the manifest: it would otherwise name a file that is cut off.
//  - Files, manifest and the folder's entries are synced before the rename: a
//    file system may keep a rename and lose what was written before it, which
//    leaves empty files under the final name after a power failure.
//  - The old folder is exchanged, not removed first: between a removal and a
//    rename there would be no checkpoint at all.
//  - All ranks wait for the rename: one that went on would tell its caller that
//    the state is saved, or begin the next save in the same DIR.tmp.
// The name becomes durable when the parent folder is synced, at the very end.

// The manifest, and then the name. By rank 0 alone.
absl::Status Commit(const std::string& dir, const std::string& tmp,
                    const proto::CheckpointManifest& manifest) {
  std::string text;
  google::protobuf::TextFormat::PrintToString(manifest, &text);
  const std::string path = absl::StrCat(tmp, "/", kManifestName);
  const int fd =
      open(path.c_str(), O_CREAT | O_TRUNC | O_WRONLY | O_CLOEXEC, 0644);
  if (fd < 0) return FileError(errno, path);
  absl::Cleanup close_fd = [fd] { close(fd); };
  TESSERA_RETURN_IF_ERROR(
      WriteAt(fd, path, 0, text.data(), static_cast<int64_t>(text.size())));
  if (fsync(fd) != 0) return FileError(errno, path);
  TESSERA_RETURN_IF_ERROR(SyncPath(tmp));
  if (rename(tmp.c_str(), dir.c_str()) != 0) {
    // `dir` is an older checkpoint: the two change names in one step.
    if (renameat2(AT_FDCWD, tmp.c_str(), AT_FDCWD, dir.c_str(),
                  RENAME_EXCHANGE) != 0) {
      return FileError(errno, absl::StrCat(tmp, " to ", dir));
    }
    std::error_code ignored;
    std::filesystem::remove_all(tmp, ignored);
  }
  return SyncFolderOf(dir);
}

absl::Status WriteFiles(const std::string& dir, const std::string& tmp,
                        const proto::CheckpointManifest& head,
                        absl::Span<const CheckpointPart> parts,
                        Communicator* comm) {
  auto file = WriteRankFile(tmp, comm->rank(), parts);
  TESSERA_RETURN_IF_ERROR(comm->AgreeOk(file.status(), "checkpoint files"));
  TESSERA_ASSIGN_OR_RETURN(
      auto tables, comm->AllGatherStrings(file->SerializeAsString(),
                                          CommTag{"checkpoint manifest"}));
  absl::Status mine;
  if (comm->rank() == 0) {
    proto::CheckpointManifest manifest = head;
    manifest.set_format_version(kFormatVersion);
    manifest.set_world_size(comm->world_size());
    for (const std::string& table : tables) {
      manifest.add_files()->ParseFromString(table);
    }
    manifest.set_fingerprint(FingerprintOf(manifest));
    mine = Commit(dir, tmp, manifest);
  }
  return comm->AgreeOk(mine, "checkpoint commit");
}

std::string Trimmed(std::string dir) {
  while (dir.size() > 1 && dir.back() == '/') dir.pop_back();
  return dir;
}

absl::Status Differs(const std::string& dir, absl::string_view what,
                     absl::string_view saved, absl::string_view here) {
  return absl::FailedPreconditionError(
      absl::StrCat("checkpoint ", dir, ": was saved with ", what, " ", saved,
                   ", this run has ", here));
}

int GroupSizeOf(const proto::CheckpointManifest& manifest) {
  return manifest.has_shard_group_size() ? manifest.shard_group_size()
                                         : manifest.world_size();
}

}  // namespace

absl::Status WriteCheckpoint(const std::string& dir_name,
                             const proto::CheckpointManifest& head,
                             absl::Span<const CheckpointPart> parts,
                             Communicator* comm) {
  const std::string dir = Trimmed(dir_name);
  const std::string tmp = absl::StrCat(dir, ".tmp");
  absl::Status mine =
      dir.empty()
          ? absl::InvalidArgumentError("checkpoint: the folder's name is empty")
          : absl::OkStatus();
  if (mine.ok() && comm->rank() == 0) mine = MakeTemporary(dir, tmp);
  TESSERA_RETURN_IF_ERROR(comm->AgreeOk(mine, "checkpoint folder"));
  absl::Status written = WriteFiles(dir, tmp, head, parts, comm);
  if (!written.ok() && comm->rank() == 0) {
    std::error_code ignored;  // what is left may be what fills the disk
    std::filesystem::remove_all(tmp, ignored);
  }
  return written;
}

absl::StatusOr<proto::CheckpointManifest> ReadManifest(
    const std::string& dir_name, const proto::CheckpointManifest& expected) {
  const std::string dir = Trimmed(dir_name);
  const std::string path = absl::StrCat(dir, "/", kManifestName);
  auto text = ReadWholeFile(path);
  if (absl::IsNotFound(text.status())) {
    return absl::NotFoundError(absl::StrCat(
        "checkpoint ", dir, ": no such checkpoint (", path, " is missing)"));
  }
  TESSERA_RETURN_IF_ERROR(text.status());
  proto::CheckpointManifest manifest;
  ReadRecord record;
  ReadProtoFromText(*text, &manifest, &record);
  if (!record.faults.empty()) {
    return absl::DataLossError(
        absl::StrCat("checkpoint ", dir, ": ", path,
                     " is damaged: ", record.faults[0].what));
  }
  if (!manifest.has_format_version() || !manifest.has_fingerprint()) {
    return absl::DataLossError(
        absl::StrCat("checkpoint ", dir, ": ", path,
                     " is damaged: it has no format_version or fingerprint"));
  }
  if (manifest.format_version() != kFormatVersion) {
    return Differs(dir, "format version",
                   absl::StrCat(manifest.format_version()),
                   absl::StrCat(kFormatVersion));
  }
  if (manifest.fingerprint() != FingerprintOf(manifest)) {
    return absl::DataLossError(
        absl::StrCat("checkpoint ", dir, ": ", path,
                     " is not what was written (fingerprint differs)"));
  }
  if (manifest.world_size() != expected.world_size()) {
    return Differs(dir, "world size", absl::StrCat(manifest.world_size()),
                   absl::StrCat(expected.world_size()));
  }
  if (manifest.stage() != expected.stage()) {
    return Differs(dir, "ZeRO stage", absl::StrCat(manifest.stage()),
                   absl::StrCat(expected.stage()));
  }
  if (GroupSizeOf(manifest) != GroupSizeOf(expected)) {
    return Differs(dir, "sharding.shard_group_size",
                   absl::StrCat(GroupSizeOf(manifest)),
                   absl::StrCat(GroupSizeOf(expected)));
  }
  if (manifest.model() != expected.model()) {
    return Differs(dir, "the model", manifest.model(), expected.model());
  }
  if (manifest.files_size() != manifest.world_size()) {
    return absl::DataLossError(absl::StrCat(
        "checkpoint ", dir, ": the manifest names ", manifest.files_size(),
        " rank files, expected ", manifest.world_size()));
  }
  return manifest;
}

absl::Status VerifyRankFile(const std::string& dir,
                            const proto::CheckpointFile& file) {
  RankFile in;
  TESSERA_RETURN_IF_ERROR(in.Open(Trimmed(dir), file.name()));
  for (const auto& chunk : file.chunks()) {
    TESSERA_ASSIGN_OR_RETURN(const std::string bytes, in.Read(chunk));
    if (FingerprintOf(bytes) != chunk.fingerprint()) {
      return absl::DataLossError(
          absl::StrCat(in.path, ": chunk '", chunk.name(), "' at byte ",
                       chunk.offset_bytes(),
                       " is not what was written (fingerprint differs)"));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<std::string> ReadText(const std::string& dir,
                                     const proto::CheckpointFile& file,
                                     absl::string_view name) {
  RankFile in;
  TESSERA_RETURN_IF_ERROR(in.Open(Trimmed(dir), file.name()));
  for (const auto& chunk : file.chunks()) {
    if (chunk.name() == name) return in.Read(chunk);
  }
  return absl::DataLossError(
      absl::StrCat(in.path, ": has no chunk '", name, "'"));
}

absl::Status ReadPart(const std::string& dir, const proto::CheckpointFile& file,
                      CheckpointPart* part) {
  TESSERA_ASSIGN_OR_RETURN(std::string bytes, ReadText(dir, file, part->name));
  if (static_cast<int64_t>(bytes.size()) != part->bytes.numel()) {
    return absl::DataLossError(absl::StrCat(
        Trimmed(dir), "/", file.name(), ": chunk '", part->name, "' has ",
        bytes.size(), " bytes, expected ", part->bytes.numel()));
  }
  part->bytes.copy_(at::from_blob(bytes.data(), {part->bytes.numel()},
                                  at::TensorOptions(at::kByte)));
  return absl::OkStatus();
}

}  // namespace tessera
