// What a checkpoint's files say (checkpoint/format), with checksums that fit:
// those guard against accidents, not against who writes them.
#include <fcntl.h>

#include <string>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "checkpoint/disk/crc32c.h"
#include "checkpoint/disk/memory_disk.h"
#include "checkpoint/format/checkpoint_reader.h"
#include "checkpoint/format/manifest.h"
#include "tests/fuzz/targets.h"

namespace tessera {
namespace {

constexpr char kFolder[] = "/ckpt";
constexpr uint64_t kId = 7;
constexpr int64_t kDataBytes = 256;

void Write(MemoryDisk* disk, const std::string& name, absl::string_view bytes) {
  const int fd =
      disk->Open(AT_FDCWD, absl::StrCat(kFolder, "/", name), O_CREAT | O_RDWR);
  disk->Write(fd, bytes.data(), static_cast<int64_t>(bytes.size()), 0);
  disk->Close(fd);
}

// One file; three storages, of which one has two states.
proto::CheckpointManifest Manifest() {
  proto::CheckpointManifest manifest;
  manifest.set_format_version(kCheckpointFormat);
  manifest.set_id(kId);
  for (int s = 0; s < 3; ++s) {
    proto::CheckpointStorage* const storage = manifest.add_storages();
    storage->set_numel(16);
    storage->set_buffer(s == 2);
    proto::CheckpointTensor* const tensor = storage->add_tensors();
    tensor->set_name(absl::StrCat("t", s));
    tensor->set_offset(0);
    for (int64_t size : {4, 4}) tensor->add_sizes(size);
    for (int64_t stride : {4, 1}) tensor->add_strides(stride);
    for (int i = 0; i <= s % 2; ++i) {
      proto::CheckpointState* const state = storage->add_states();
      state->set_name(i == 0 ? "value" : "exp_avg");
      state->set_dtype("F32");
    }
  }
  return manifest;
}

proto::CheckpointIndex Index() {
  proto::CheckpointIndex index;
  const int states[][2] = {{0, 0}, {1, 0}, {1, 1}, {2, 0}};
  int64_t offset = 0;
  for (const auto& [storage, state] : states) {
    proto::CheckpointPiece* const piece = index.add_pieces();
    piece->set_storage(storage);
    piece->set_state(state);
    piece->set_begin(0);
    piece->set_end(16);
    piece->set_offset(offset);
    piece->add_block_crcs(0x03c8eb67);  // of 64 zeros
    offset += 64;
  }
  index.add_values()->set_name("rank");
  return index;
}

std::string DataBytes(absl::string_view index) {
  return absl::StrCat(std::string(kDataBytes, '\0'), index);
}

// Reads all that `disk` holds as far as it can be read.
bool ReadAll(MemoryDisk* disk) {
  absl::StatusOr<CheckpointReader> reader =
      CheckpointReader::Open(kFolder, disk);
  if (!reader.ok()) return false;
  for (int r = 0; r < reader->manifest().files_size(); ++r) {
    if (!reader->ValuesOf(r).ok()) return false;
  }
  return reader->Verify(/*num_threads=*/1).ok();
}

void ReadManifestBytes(absl::string_view input) {
  MemoryDisk disk;
  disk.MakeFolder(AT_FDCWD, kFolder);
  proto::CheckpointManifest manifest;
  // Whatever can be parsed is framed; the rest stands there as it is.
  const bool parsed =
      manifest.ParseFromArray(input.data(), static_cast<int>(input.size()));
  Write(&disk, DataFileName(kId, 0), DataBytes(Index().SerializeAsString()));
  Write(&disk, kManifestName,
        parsed ? EncodeManifest(manifest).value() : std::string(input));
  ReadAll(&disk);
}

// That names a data file which ends with `index`.
proto::CheckpointManifest ManifestOver(absl::string_view index) {
  proto::CheckpointManifest manifest = Manifest();
  proto::CheckpointFile* const file = manifest.add_files();
  file->set_bytes(kDataBytes + static_cast<int64_t>(index.size()));
  file->set_index_offset(kDataBytes);
  file->set_index_bytes(static_cast<int64_t>(index.size()));
  file->set_index_crc(Crc32c(index));
  for (int64_t step : {0, 3}) file->add_storage_ranges(step);
  return manifest;
}

bool ReadIndexBytes(absl::string_view input) {
  MemoryDisk disk;
  disk.MakeFolder(AT_FDCWD, kFolder);
  Write(&disk, kManifestName, EncodeManifest(ManifestOver(input)).value());
  Write(&disk, DataFileName(kId, 0), DataBytes(input));
  return ReadAll(&disk);
}

}  // namespace

FuzzTarget CheckpointManifestTarget() {
  const proto::CheckpointManifest manifest =
      ManifestOver(Index().SerializeAsString());
  return {"checkpoint_manifest",
          ReadManifestBytes,
          {manifest.SerializeAsString(), EncodeManifest(manifest).value()},
          20000};
}

FuzzTarget CheckpointIndexTarget() {
  const std::string index = Index().SerializeAsString();
  TESSERA_CHECK(ReadIndexBytes(index));
  return {"checkpoint_index",
          [](absl::string_view input) { ReadIndexBytes(input); },
          {index},
          20000};
}

}  // namespace tessera
