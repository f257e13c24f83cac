// SavedPieces: the tensors that a save still has to write, while training goes
// on. Tensors that nobody changes before Detach stay where they lie; the rest
// is copied at once. Detach copies what has not been written by then, so a fast
// disk costs no memory, and a slow one a copy of what is left. Detach waits for
// states that lie on a disk themselves, since memory may not hold them. States
// that are kept in fewer bits than they are written in are copied as they are
// kept.
//
//   training  Keep() ... forward, backward ...  Detach()  step ...
//   writer      Part(0) Part(0) Written(0) Part(1) ... Written(n)
//
// Threads: Part and Written from one, Keep and Detach from another.
#ifndef CHECKPOINT_SAVE_SAVED_PIECES_H_
#define CHECKPOINT_SAVE_SAVED_PIECES_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "base/layout/layout.h"
#include "checkpoint/copy_memory.h"
#include "offload/element_format.h"
#include "offload/tiered_buffer.h"

namespace tessera {

// Elements of a state of a storage.
struct SavedPiece {
  int storage = 0;
  int state = 0;
  int64_t begin = 0;    // element
  at::Tensor elements;  // contiguous, any device
  // The elements do not change before Detach.
  bool lasts = false;
  bool own = false;  // nor later: nothing else has them
  // The buffer that has them, where they are not in memory: its elements
  // `part`. `elements` is undefined then, and they do not change before Detach.
  const TieredBuffer* elsewhere = nullptr;
  // The format of the elements. If `decode` is set, they are blocks: `part` of
  // a state. Float32 numbers are written; `decode` makes the first `numel` of
  // `blocks`.
  ElementFormat format;
  std::function<void(const char* blocks, int64_t numel, float* to)> decode;
  Range part;

  // Elements and bytes as they are written.
  int64_t numel() const {
    return elements.defined() && !decode ? elements.numel() : part.numel();
  }
  int64_t bytes() const {
    if (decode) return part.numel() * static_cast<int64_t>(sizeof(float));
    return elements.defined() ? static_cast<int64_t>(elements.nbytes())
                              : format.BytesOf(part.numel());
  }
  // Reads bytes [begin, begin + bytes) of what `elsewhere` has. Blocking.
  absl::Status ReadElsewhere(int64_t begin, int64_t bytes, char* to) const {
    return elsewhere->ReadBytes(format.BytesOf(part.begin) + begin, bytes, to);
  }
};

// Waits until devices have computed them: they are read on another thread,
// which has another current stream. LOCAL.
void AwaitDevices(const std::vector<SavedPiece>& pieces);

class SavedPieces {
 public:
  // REQUIRES: AwaitDevices.
  explicit SavedPieces(std::vector<SavedPiece> pieces);

  size_t size() const { return pieces_.size(); }
  const SavedPiece& operator[](size_t i) const { return pieces_[i]; }

  // Copies pieces that do not last; all others are read under a lock from here
  // on, since Detach may be called. Without Keep, nothing may change until all
  // is written. ResourceExhausted. LOCAL.
  absl::Status Keep();
  // Ends all reads of the pieces' own memory. Blocks for a copy of what has not
  // been written; where there is no memory for that, or some of it is not in
  // memory, until it has been written. LOCAL.
  void Detach();
  // Marks that nothing more is written: Detach does not wait.
  void Abandon();
  bool abandoned();
  // Whether Detach waits for all to be written.
  bool awaited();

  // Returns `bytes` of piece `i` from byte `begin` on, which must begin a
  // block: where they lie, or in `scratch`.
  absl::StatusOr<absl::string_view> Part(size_t i, int64_t begin, int64_t bytes,
                                         std::string* scratch);
  // Marks piece `i` as written and frees its copy. REQUIRES: those before it
  // are written.
  void Written(size_t i);

 private:
  struct Copy {
    CopyMemory* memory = nullptr;  // null: `pinned`
    int64_t at = 0;                // byte of it
    at::Tensor pinned;             // of a device's
    bool made = false, written = false;
  };
  // Copies the pieces that are not written; with `all` false, only those that
  // do not last.
  absl::Status CopyNow(bool all, CopyMemory* memory)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // As Part, for pieces as they are kept.
  absl::StatusOr<absl::string_view> Kept(size_t i, int64_t begin, int64_t bytes,
                                         std::string* scratch)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool AnyElsewhere() const ABSL_SHARED_LOCKS_REQUIRED(mutex_);
  bool AllWritten() const ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
    return abandoned_ || num_written_ == pieces_.size();
  }

  const std::vector<SavedPiece> pieces_;
  absl::Mutex mutex_;
  CopyMemory kept_memory_ ABSL_GUARDED_BY(mutex_);  // by Keep
  CopyMemory detached_memory_ ABSL_GUARDED_BY(mutex_);
  std::vector<Copy> copies_ ABSL_GUARDED_BY(mutex_);
  size_t num_written_ ABSL_GUARDED_BY(mutex_) = 0;
  bool abandoned_ ABSL_GUARDED_BY(mutex_) = false;
  bool awaited_ ABSL_GUARDED_BY(mutex_) = false;
  bool kept_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace tessera
#endif  // CHECKPOINT_SAVE_SAVED_PIECES_H_
