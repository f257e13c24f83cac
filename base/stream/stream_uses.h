// Records which streams of a device use a piece of memory, or work on something
// one after the other. It does nothing on the CPU; with one stream it costs an
// event for each filling.
//
// Threads: the caller serializes the calls.
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

  // Says that what this thread's current stream has been given fills the
  // memory. REQUIRES: nobody uses the previous contents.
  void SetReady();
  // Makes this thread's current stream wait until the memory is filled; it is a
  // user from here on.
  void Use();
  // Makes this thread's current stream wait for all uses so far.
  void OrderAfter() const;
  // Keeps `memory`, which is about to be freed, until the uses are over.
  void Keep(const at::Tensor& memory) const;

 private:
  const c10::Device device_;
  StreamPoint ready_;
  std::vector<c10::Stream> streams_;  // those that come after ready_
};

// Hands work from one stream to the next: each goes on where the one before has
// ended.
class StreamChain {
 public:
  explicit StreamChain(c10::Device device) : device_(device) {}
  // Makes this thread's current stream the next one.
  void Enter();

 private:
  const c10::Device device_;
  std::optional<c10::Stream> last_;
};

// Keeps `memory`, which is about to be freed, until what this thread's current
// stream has been given is done.
void KeepForCurrentStream(const at::Tensor& memory);

}  // namespace tessera
#endif  // BASE_STREAM_STREAM_USES_H_
