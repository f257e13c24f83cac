// Fuzzes the contents of a checkpoint's files (checkpoint/format), with
// matching checksums: those guard against accidents, not against attackers.
#include <fcntl.h>

#include <cstdint>
#include <cstring>
#include <string>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/crc32c.h"
#include "checkpoint/format/checkpoint_reader.h"
#include "checkpoint/format/manifest.h"
#include "testing/disk/memory_disk.h"
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

// The manifest has one file and three storages, one of them with two states.
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
  Write(&disk, DataFileName(kId, 0), DataBytes(Index().SerializeAsString()));
  // An input without a frame gets one.
  constexpr absl::string_view kMagic = "tsr ckpt";
  std::string bytes(input);
  if (input.substr(0, kMagic.size()) != kMagic) {
    bytes = absl::StrCat(kMagic, BytesOf(uint64_t{input.size()}), input);
    absl::StrAppend(&bytes, BytesOf(Crc32c(bytes)));
  }
  Write(&disk, kManifestName, bytes);
  ReadAll(&disk);
}

// Returns a manifest that names a data file which ends with `index`.
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

// Returns an input that is a whole checkpoint: lengths of the manifest and of
// the index, two bytes each, both, and the data file's other bytes.
std::string CheckpointInput(const proto::CheckpointManifest& manifest,
                            const proto::CheckpointIndex& index,
                            absl::string_view data) {
  const std::string head = manifest.SerializeAsString();
  const std::string tail = index.SerializeAsString();
  return absl::StrCat(BytesOf(static_cast<uint16_t>(head.size())),
                      BytesOf(static_cast<uint16_t>(tail.size())), head, tail,
                      data);
}

absl::string_view Take(size_t bytes, absl::string_view* input) {
  const absl::string_view taken = input->substr(0, bytes);
  input->remove_prefix(taken.size());
  return taken;
}

uint16_t TakeLength(absl::string_view* input) {
  uint16_t length = 0;
  const absl::string_view taken = Take(sizeof(length), input);
  std::memcpy(&length, taken.data(), taken.size());
  return length;
}

// Sets the block checksums of the pieces that lie in `data`.
void FitChecksums(const proto::CheckpointManifest& manifest,
                  absl::string_view data, proto::CheckpointIndex* index) {
  for (proto::CheckpointPiece& piece : *index->mutable_pieces()) {
    if (piece.storage() < 0 || piece.storage() >= manifest.storages_size()) {
      continue;
    }
    const auto& states = manifest.storages(piece.storage()).states();
    if (piece.state() < 0 || piece.state() >= states.size()) continue;
    const int64_t size = DtypeBytes(states[piece.state()].dtype());
    const int64_t most = static_cast<int64_t>(data.size());
    if (piece.offset() < 0 || piece.offset() > most || piece.begin() < 0 ||
        piece.end() <= piece.begin() || piece.end() > most || size == 0) {
      continue;
    }
    const absl::string_view bytes =
        data.substr(static_cast<size_t>(piece.offset()),
                    static_cast<size_t>((piece.end() - piece.begin()) * size));
    piece.clear_block_crcs();
    for (size_t at = 0; at < bytes.size(); at += kBlockBytes) {
      piece.add_block_crcs(Crc32c(bytes.substr(at, kBlockBytes)));
    }
  }
}

// Checks that what verifies can be read, any part of it, and has the bytes of
// the file.
void ReadParts(CheckpointReader* reader, int64_t file_bytes) {
  int64_t total = 0;
  for (int s = 0; s < reader->manifest().storages_size(); ++s) {
    const proto::CheckpointStorage& storage = reader->manifest().storages(s);
    for (int i = 0; i < storage.states_size() && storage.numel() > 0; ++i) {
      const int64_t size = DtypeBytes(storage.states(i).dtype());
      total += storage.numel() * size;
      TESSERA_CHECK(total <= file_bytes);
      const int64_t begin = storage.numel() / 3;
      const int64_t end = storage.numel() - begin;
      std::string all(static_cast<size_t>(storage.numel() * size), '\0');
      std::string part(static_cast<size_t>((end - begin) * size), '\0');
      TESSERA_CHECK_OK(
          reader->Read({{s, i, 0, storage.numel(), all.data()}}, 1));
      TESSERA_CHECK_OK(reader->Read({{s, i, begin, end, part.data()}}, 1));
      TESSERA_CHECK(
          all.substr(static_cast<size_t>(begin * size), part.size()) == part);
    }
  }
}

// Makes sizes and checksums match, so that the rest is checked.
bool ReadCheckpointBytes(absl::string_view input) {
  const uint16_t head_bytes = TakeLength(&input);
  const uint16_t tail_bytes = TakeLength(&input);
  proto::CheckpointManifest manifest;
  proto::CheckpointIndex index;
  const absl::string_view head = Take(head_bytes, &input);
  const absl::string_view tail = Take(tail_bytes, &input);
  if (!ParseMessage(head, &manifest) || !ParseMessage(tail, &index)) {
    return false;
  }
  FitChecksums(manifest, input, &index);
  const std::string index_bytes = index.SerializeAsString();
  manifest.set_id(kId);
  if (manifest.files_size() > 0) {
    proto::CheckpointFile* const file = manifest.mutable_files(0);
    const int64_t end = static_cast<int64_t>(index_bytes.size());
    file->set_bytes(static_cast<int64_t>(input.size()) + end);
    file->set_index_offset(static_cast<int64_t>(input.size()));
    file->set_index_bytes(end);
    file->set_index_crc(Crc32c(index_bytes));
  }
  MemoryDisk disk;
  disk.MakeFolder(AT_FDCWD, kFolder);
  Write(&disk, kManifestName, EncodeManifest(manifest).value());
  Write(&disk, DataFileName(kId, 0), absl::StrCat(input, index_bytes));
  absl::StatusOr<CheckpointReader> reader =
      CheckpointReader::Open(kFolder, &disk);
  if (!reader.ok()) return false;
  // Where verification fails, this reads one element.
  char number[8];
  for (int s = 0; s < reader->manifest().storages_size(); ++s) {
    for (int i = 0; i < reader->manifest().storages(s).states_size(); ++i) {
      (void)reader->Read({{s, i, 0, 1, number}}, 1);
    }
  }
  if (!reader->Verify(1).ok()) return false;
  if (reader->manifest().files_size() == 1) {
    ReadParts(&*reader, static_cast<int64_t>(input.size()));
  }
  return true;
}

}  // namespace

FuzzTarget CheckpointDataTarget() {
  const std::string input =
      CheckpointInput(ManifestOver(""), Index(), std::string(kDataBytes, 'x'));
  TESSERA_CHECK(ReadCheckpointBytes(input));
  // Two dtypes, pieces out of order, a gap between them.
  proto::CheckpointManifest manifest = ManifestOver("");
  manifest.mutable_storages(0)->mutable_states(0)->set_dtype("BF16");
  proto::CheckpointIndex index = Index();
  index.mutable_pieces()->SwapElements(0, 1);
  std::string data = std::string(64, 'a') + std::string(32, 'b') +
                     std::string(32, '\0') + std::string(128, 'c');
  for (int i = 0; i < index.pieces_size(); ++i) {
    index.mutable_pieces(i)->set_offset(64 * i);
  }
  const std::string other = CheckpointInput(manifest, index, data);
  TESSERA_CHECK(ReadCheckpointBytes(other));
  return {"checkpoint_data",
          [](absl::string_view bytes) { ReadCheckpointBytes(bytes); },
          {input, other},
          20000};
}

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
