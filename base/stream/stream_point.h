// StreamPoint: a point in the work of a device's stream, for others to come
// after. All work of the CPU is done when it is asked for: its points are
// empty, and cost nothing.
//
//   StreamPoint written = StreamPoint::Now(device);   // this thread's stream
//   ... another thread, or another current stream ...
//   written.Order();                                  // comes after that
//
// Only Wait waits on the host.
#ifndef BASE_STREAM_STREAM_POINT_H_
#define BASE_STREAM_STREAM_POINT_H_

#include <memory>

#include "c10/core/Device.h"

namespace c10 {
struct Event;
}

namespace tessera {

class StreamPoint {
 public:
  StreamPoint() = default;
  // All that this thread's current stream of `device` has been given so far.
  static StreamPoint Now(c10::Device device);

  // What this thread's current stream of the device is given from here on comes
  // after the point. Any thread.
  void Order() const;
  // Blocks this thread until the point is reached: for what the host reads or
  // writes itself.
  void Wait() const;

 private:
  std::shared_ptr<const c10::Event> event_;
};

}  // namespace tessera
#endif  // BASE_STREAM_STREAM_POINT_H_
