// TarShards: samples of several files each, in tar archives: WebDataset's
// format.
//
//   train-000.tar   dog/001.jpg   dog/001.cls   dog/002.jpg   dog/002.cls
//                   sample "dog/001"            sample "dog/002"
//                     "jpg", "cls"                "jpg", "cls"
//
// Files that lie beside each other and have the same name up to the first dot
// behind the last slash are a sample; what is behind the dot, in small letters,
// names the field ("jpg", "seg.png"). Files without a dot or with one in front,
// and names like __this__, are passed over. Source: webdataset/webdataset,
// tariterators.py (base_plus_ext, group_by_keys).
//
// Archives are mapped and their headers read once, so any sample can be taken
// at any time, without copying: a DistributedSampler or a Mixture says which,
// and a run goes on exactly where it stopped. Archives must not be packed; what
// images or text are made of the bytes is the program's affair.
//
// Memory: 32 bytes and the key for each sample, 24 for each file. For pages and
// truncated files see data/mapped_file.h. Threads: const methods may run
// concurrently.
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

  // The archives of a pattern ("train-{000..099}.tar", data/file_names.h), or
  // these, in this order. Errors are MatchFiles', MappedFile's and
  // ForEachTarMember's; DataLoss naming archive and byte where a sample has a
  // field twice, or where files of a sample do not lie beside each other (tar
  // --sort=name sees to that); InvalidArgument for archives without a sample.
  // LOCAL: ranks see the same samples if they see the same archives.
  static absl::StatusOr<TarShards> Open(absl::string_view pattern);
  static absl::StatusOr<TarShards> OpenFiles(
      absl::Span<const std::string> paths);

  // Of all archives, in their order.
  int64_t num_samples() const { return static_cast<int64_t>(samples_.size()); }

  // Of a sample; valid as long as this. REQUIRES: 0 <= index < num_samples().
  absl::string_view key(int64_t index) const;
  std::vector<Field> fields(int64_t index) const;
  // NotFound naming archive, byte, sample and what it has, if it has no such.
  absl::StatusOr<absl::Span<const uint8_t>> field(int64_t index,
                                                  absl::string_view name) const;
  // "train-000.tar: byte 512: sample dog/001", for messages.
  std::string Describe(int64_t index) const;

 private:
  struct Member {
    int64_t begin;  // in the archive
    int64_t size;
    int32_t name;  // of names_
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
  std::vector<std::string> names_;  // of fields
  std::string keys_;                // one behind the other
};

}  // namespace tessera
#endif  // DATA_TAR_TAR_SHARDS_H_
