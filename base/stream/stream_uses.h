// Which streams of a device use a piece of memory, or work on something one
// after the other. Nothing on the CPU; with one stream an event for each
// filling.
//
// Threads: outside order.
#ifndef BASE_STREAM_STREAM_USES_H_
#define BASE_STREAM_STREAM_USES_H_

#include <optional>
#include <vector>

#include "ATen/core/Tensor.h"
#include "base/stream/stream_point.h"
#include "c10/core/Device.h"
#include "c10/core/Stream.h"

namespace tessera {

// Memory that is filled at one point, used from any stream, and then freed or
// filled again.
class StreamUses {
 public:
  explicit StreamUses(c10::Device device) : device_(device) {}

  // The memory is filled by what this thread's current stream has been given.
  // REQUIRES: nobody uses what was there before.
  void SetReady();
  // This thread's current stream uses it from here on.
  void Use();
  // This thread's current stream goes on after all uses.
  void OrderAfter() const;
  // `memory` is about to be freed: it stays until the uses are over.
  void Keep(const at::Tensor& memory) const;

 private:
  const c10::Device device_;
  StreamPoint ready_;
  std::vector<c10::Stream> streams_;  // that come after ready_
};

// Work that is handed from one stream to the next: each goes on where the one
// before has ended.
class StreamChain {
 public:
  explicit StreamChain(c10::Device device) : device_(device) {}
  // It is this thread's current stream that goes on.
  void Enter();

 private:
  const c10::Device device_;
  std::optional<c10::Stream> last_;
};

// `memory` is about to be freed, and what this thread's current stream does to
// it may be under way: it stays until that is over.
void KeepForCurrentStream(const at::Tensor& memory);

}  // namespace tessera
#endif  // BASE_STREAM_STREAM_USES_H_
