// TarShards reads samples of several files each from tar archives, in
// WebDataset's format.
//
//   train-000.tar   dog/001.jpg   dog/001.cls   dog/002.jpg   dog/002.cls
//                   sample "dog/001"            sample "dog/002"
//                     "jpg", "cls"                "jpg", "cls"
//
// Adjacent files whose names agree up to the first dot after the last slash
// are a sample; what follows the dot, in small letters, names the field ("jpg",
// "seg.png"). Files without a dot or with a leading dot, and names like
// __this__, are skipped. Source: webdataset/webdataset, tariterators.py
// (base_plus_ext, group_by_keys).
//
// Archives are mapped and their headers read once, so any sample can be taken
// at any time without copying: a DistributedSampler or a Mixture chooses, and a
// run resumes exactly where it stopped. Archives must not be compressed;
// decoding images or text from the bytes is the program's task.
//
// It takes 32 bytes and the key for each sample, and 24 bytes for each file.
// See data/mapped_file.h for pages and truncated files. Threads: const methods
// may run concurrently.
#ifndef DATA_TAR_TAR_SHARDS_H_
#define DATA_TAR_TAR_SHARDS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "data/mapped_file.h"

namespace tessera {

class TarShards {
 public:
  struct Field {
    absl::string_view name;           // "jpg"
    absl::Span<const uint8_t> bytes;  // of its file
  };

  // Open the archives of a pattern ("train-{000..099}.tar", data/file_names.h),
  // or the given ones, in this order. Errors are those of MatchFiles,
  // MappedFile and ForEachTarMember; DataLoss naming archive and byte if a
  // sample has a field twice, or if the files of a sample are not adjacent (tar
  // --sort=name makes them so); InvalidArgument for archives without a sample.
  // LOCAL: ranks see the same samples if they see the same archives.
  static absl::StatusOr<TarShards> Open(absl::string_view pattern);
  static absl::StatusOr<TarShards> OpenFiles(
      absl::Span<const std::string> paths);

  // Counts the samples of all archives, in their order.
  int64_t num_samples() const { return static_cast<int64_t>(samples_.size()); }

  // Return a sample's key and fields; valid as long as this. REQUIRES: 0 <=
  // index < num_samples().
  absl::string_view key(int64_t index) const;
  std::vector<Field> fields(int64_t index) const;
  // Returns one field. NotFound names archive, byte, sample and the fields that
  // it has.
  absl::StatusOr<absl::Span<const uint8_t>> field(int64_t index,
                                                  absl::string_view name) const;
  // Returns "train-000.tar: byte 512: sample dog/001", for messages.
  std::string Describe(int64_t index) const;

 private:
  struct Member {
    int64_t begin;  // in the archive
    int64_t size;
    int32_t name;  // index in names_
  };
  struct Sample {
    int64_t first_member;
    int64_t header;     // byte of the archive
    int64_t key_begin;  // in keys_; ends where the next one begins
    int32_t shard;
    int32_t num_members;
  };
  class Builder;

  TarShards() = default;
  const Sample& At(int64_t index) const;
  Field FieldOf(const Sample& sample, int64_t i) const;

  std::vector<MappedFile> shards_;
  std::vector<Sample> samples_;
  std::vector<Member> members_;
  std::vector<std::string> names_;  // the fields' names
  std::string keys_;                // one after the other
};

}  // namespace tessera
#endif  // DATA_TAR_TAR_SHARDS_H_
