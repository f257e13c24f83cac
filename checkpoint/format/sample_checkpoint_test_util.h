// SampleCheckpoint is a model's state of a few storages, as any number of ranks
// would save it. For tests.
#ifndef CHECKPOINT_FORMAT_SAMPLE_CHECKPOINT_TEST_UTIL_H_
#define CHECKPOINT_FORMAT_SAMPLE_CHECKPOINT_TEST_UTIL_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "checkpoint/format/checkpoint_folder.h"

namespace tessera {

class SampleCheckpoint {
 public:
  // Makes storages of 1 to some 100,000 elements with one to three states each;
  // another `seed` gives other values.
  explicit SampleCheckpoint(int seed, bool large = false);

  // Saves it as `num_ranks` ranks do, each of which owns a slice of every
  // storage. `*committed` is that of Saving::Commit.
  absl::Status Save(const std::string& path, FileSystem* files, int num_ranks,
                    bool* committed) const;
  // Returns OK if all of it is there, read as `num_ranks` other ranks would.
  absl::Status Compare(const std::string& path, FileSystem* files,
                       int num_ranks) const;

  const proto::CheckpointManifest& head() const { return head_; }
  void set_saved_unix_micros(int64_t micros) {
    head_.set_saved_unix_micros(micros);
  }
  // Returns the bytes of a state of a storage.
  const std::string& bytes(int storage, int state) const {
    return bytes_[storage][state];
  }

 private:
  proto::CheckpointManifest head_;
  std::vector<std::vector<std::string>> bytes_;
};

// Returns slice number `part` of `parts` slices of [0, numel), cut at multiples
// of 64.
std::pair<int64_t, int64_t> SliceOf(int64_t numel, int part, int parts);

}  // namespace tessera
#endif  // CHECKPOINT_FORMAT_SAMPLE_CHECKPOINT_TEST_UTIL_H_
