// TracedMemory: the memory of a storage that a trace (or ConstructFake) made.
//
//   fake   the storage has its nbytes and no memory; any access to its data
//          throws, saying what to do
//   known  it has memory, which holds the values that it would hold really
//
// Either way its DataPtr is ours, so that the log is told when it dies.
//
// Threads: any; one storage needs outside order.
#ifndef SHARDING_TRACE_TRACED_MEMORY_H_
#define SHARDING_TRACE_TRACED_MEMORY_H_

#include <cstdint>
#include <memory>

#include "ATen/core/Tensor.h"
#include "c10/core/Storage.h"
#include "sharding/trace/trace_log.h"

namespace tessera {

class TracedMemory {
 public:
  ~TracedMemory();
  TracedMemory(const TracedMemory&) = delete;
  TracedMemory& operator=(const TracedMemory&) = delete;

  // Returns the memory of `storage`; null: it is not of a trace.
  static TracedMemory* Of(c10::StorageImpl* storage);

  // Makes a new fake storage. `log` may be null: it belongs to no trace.
  static c10::Storage Fake(int64_t bytes, std::shared_ptr<TraceLog> log);
  // Follows the memory of `storage`, which a kernel has just made; it is known.
  static void Follow(c10::StorageImpl* storage, std::shared_ptr<TraceLog> log);
  // Makes it fake: its values are no longer known, and its data must not be
  // read.
  static void Forget(c10::StorageImpl* storage);
  // Resizes it to `bytes`, whose values are not known.
  static void Regrow(c10::StorageImpl* storage, int64_t bytes,
                     std::shared_ptr<TraceLog> log);

  bool known() const { return known_; }
  const std::shared_ptr<TraceLog>& log() const { return log_; }
  int32_t allocation() const { return allocation_; }

 private:
  TracedMemory(int64_t bytes, std::shared_ptr<TraceLog> log, bool known);
  static void Delete(void* memory);
  static c10::DataPtr PtrOf(std::unique_ptr<TracedMemory> memory, void* data);

  const std::shared_ptr<TraceLog> log_;
  const int64_t bytes_;
  bool known_;
  int32_t allocation_ = -1;
  c10::DataPtr real_;  // known: the memory
};

}  // namespace tessera
#endif  // SHARDING_TRACE_TRACED_MEMORY_H_
