// SharedCopy: one working copy for all ranks of a host. Operators read it
// through a read-only mapping; the engine writes its owned part through
// another. Owners write only after every rank has entered the update and before
// any rank uses the flat again (Await). A user's write goes to a private copy
// of this rank, whose owned part is taken over at the next update.
#ifndef SHARDING_COPY_SHARED_COPY_H_
#define SHARDING_COPY_SHARED_COPY_H_

#include <memory>

#include "base/memory/write_faults.h"
#include "sharding/copy/working_copy.h"

namespace tessera {

class SharedCopy : public WorkingCopy {
 public:
  static absl::StatusOr<std::unique_ptr<WorkingCopy>> Make(
      const FlatDescription* flat, ShardStates* states);

  void Drop() override;
  void Free() override;
  void Publish(CommFuture /*updated*/) override {}
  bool Await(const CommFuture& written) override;
  absl::Status PrepareWrite() override;
  void Restore() override { Free(); }
  absl::Status PrepareReceive() override { return PrepareWrite(); }

 private:
  using WorkingCopy::WorkingCopy;
  // Makes whole() the copy that all ranks read.
  void ReadShared();

  bool private_ = false;  // whole() is memory of this rank's own
  std::unique_ptr<WriteFaults> write_faults_;
};

}  // namespace tessera
#endif  // SHARDING_COPY_SHARED_COPY_H_
