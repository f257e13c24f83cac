// StreamPoint is a point in the work of a device's stream, which other streams
// or the host can wait for. Work of the CPU is done as soon as it is given: its
// points are empty and cost nothing.
//
//   StreamPoint written = StreamPoint::Now(device);   // this thread's stream
//   ... another thread, or another current stream ...
//   written.Order();                                  // comes after that
//
// Only Wait blocks the host.
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
  // Returns the end of all that this thread's current stream of `device` has
  // been given so far.
  static StreamPoint Now(c10::Device device);

  // Makes what this thread's current stream of the device is given from here on
  // wait for the point. Any thread.
  void Order() const;
  // Blocks this thread until the point is reached, for what the host itself
  // reads or writes.
  void Wait() const;

 private:
  std::shared_ptr<const c10::Event> event_;
};

}  // namespace tessera
#endif  // BASE_STREAM_STREAM_POINT_H_
