// OnCommStream: orders a collective among a device's streams. While it lives,
// this thread's communication stream of the device, or that of a lane, is the
// current one, ordered after what the collective has to wait for. It does
// nothing for the CPU.
//
//   OnCommStream scope(device, after, lane);
//   ... the collective ...
//   result = scope.Now();        // for those who read it
#ifndef COMM_GROUP_COMM_STREAM_H_
#define COMM_GROUP_COMM_STREAM_H_

#include <optional>

#include "base/stream/stream_point.h"
#include "c10/core/Device.h"
#include "c10/core/StreamGuard.h"

namespace tessera {

class OnCommStream {
 public:
  OnCommStream(c10::Device device, const StreamPoint& after, int lane = 0);
  StreamPoint Now() const { return StreamPoint::Now(device_); }

 private:
  const c10::Device device_;
  std::optional<c10::StreamGuard> guard_;  // of device and stream
};

}  // namespace tessera
#endif  // COMM_GROUP_COMM_STREAM_H_
