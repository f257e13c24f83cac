// CheckpointReader reads any ranges of elements of a checkpoint, whichever rank
// wrote them. Each wanted byte is read once, in the order of the files, by
// several threads (checkpoint/format/piece_reads.h), and verified before it
// counts. No torch.
//
// Threads: one.
#ifndef CHECKPOINT_FORMAT_CHECKPOINT_READER_H_
#define CHECKPOINT_FORMAT_CHECKPOINT_READER_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "checkpoint/disk/folder.h"
#include "checkpoint/format/data_file.h"
#include "checkpoint/format/manifest.h"

namespace tessera {

// Elements [begin, end) of a state of a storage, to be read to `to` in the
// dtype of the manifest. If `to` is null they are only verified.
struct WantedElements {
  int storage = 0;
  int state = 0;
  int64_t begin = 0;
  int64_t end = 0;
  char* to = nullptr;
};

class CheckpointReader {
 public:
  // Reads the manifest. A data file that is opened later and is gone, since
  // another save has replaced this checkpoint, is an error; two checkpoints are
  // never mixed. LOCAL. Returns NotFound, DataLoss or FailedPrecondition.
  static absl::StatusOr<CheckpointReader> Open(const std::string& path,
                                               FileSystem* files);

  // Opens a checkpoint with all its data files (if there are at most a
  // hundred): replacing or removing it then does not disturb the reader. If it
  // is replaced while this opens files, this opens the next one, a few times.
  // LOCAL.
  static absl::StatusOr<CheckpointReader> OpenToStay(const std::string& path,
                                                     FileSystem* files);

  // Opens a checkpoint by the given bytes of its manifest. The folder may lack
  // the manifest, and is created if it is not there. LOCAL.
  static absl::StatusOr<CheckpointReader> WithManifest(
      const std::string& path, absl::string_view manifest, FileSystem* files);

  const proto::CheckpointManifest& manifest() const { return *manifest_; }
  const std::string& path() const { return folder_->path(); }
  const Folder& folder() const { return *folder_; }

  // Returns the ranks whose data files may have some of `wanted`, by the
  // manifest alone, ascending. LOCAL.
  std::vector<int> MayHave(absl::Span<const WantedElements> wanted) const;
  // Returns the ranks whose data files have some of `wanted`. LOCAL; reads
  // indices that are not known yet.
  absl::StatusOr<std::vector<int>> FilesOf(
      absl::Span<const WantedElements> wanted);
  // IndexBytes returns the index of a data file, as bytes; KnowIndex takes that
  // of a file that is not in this folder. DataLoss. LOCAL.
  absl::StatusOr<std::string> IndexBytes(int rank) const;
  absl::Status KnowIndex(int rank, absl::string_view bytes);

  // Fills all that is wanted; after an error some of it is filled. DataLoss
  // names the file and the tensor: damaged, or elements that no file has.
  // LOCAL.
  absl::Status Read(absl::Span<const WantedElements> wanted, int num_threads);
  // Returns the values that the writing rank `rank` has stored for itself.
  // LOCAL.
  absl::StatusOr<std::vector<proto::CheckpointValue>> ValuesOf(int rank);
  // Reads and checks everything: each element is there exactly once, and the
  // gaps are zeros. `progress` is called with bytes done and in all, about
  // every GiB. LOCAL.
  absl::Status Verify(
      int num_threads,
      const std::function<void(int64_t, int64_t)>& progress = nullptr);

  // Returns whether files stay open from their first use on. False if the
  // checkpoint has so many files that a process may not be able to open them
  // all.
  bool keeps_files_open() const;
  // Returns the bytes read from data files, indices included.
  int64_t bytes_read() const { return bytes_read_; }

 private:
  struct Source {
    int rank = 0;
    proto::CheckpointIndex index;
    // Null if files are not kept open.
    std::shared_ptr<const DataFileReader> file;
  };
  // What a thread takes at once.
  struct Task {
    const Source* source;
    const proto::CheckpointPiece* piece;
    int64_t begin, end;  // bytes, of the piece
    char* to;            // null: only to be checked
  };
  // A part of what is wanted that some file has.
  struct Cover {
    size_t wanted;
    int64_t begin, end;  // elements
  };

  CheckpointReader(Folder folder, proto::CheckpointManifest manifest);
  absl::StatusOr<DataFileReader> OpenFile(int rank) const;
  absl::StatusOr<const Source*> SourceOf(int rank);
  absl::StatusOr<std::shared_ptr<const DataFileReader>> FileOf(
      const Source& source) const;
  absl::Status PlanFile(int rank, absl::Span<const WantedElements> sorted,
                        std::vector<Task>* tasks, std::vector<Cover>* covers);
  absl::Status CheckGaps(int rank);
  absl::Status CheckCovered(absl::Span<const WantedElements> sorted,
                            std::vector<Cover>* covers) const;
  absl::Status Run(std::vector<Task> tasks, int num_threads);
  absl::Status RunSome(const std::vector<Task>& tasks,
                       std::atomic<size_t>* next, int64_t* read) const;
  std::string NameOf(int storage, int state) const;
  int64_t ElementBytes(int storage, int state) const;

  std::unique_ptr<Folder> folder_;
  std::unique_ptr<proto::CheckpointManifest> manifest_;
  absl::flat_hash_map<int, std::unique_ptr<Source>> sources_;
  int64_t bytes_read_ = 0;
};

}  // namespace tessera
#endif  // CHECKPOINT_FORMAT_CHECKPOINT_READER_H_
