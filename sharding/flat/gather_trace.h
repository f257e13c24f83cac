// GatherTrace: a gather on its way, for the trace of a run.
#ifndef SHARDING_FLAT_GATHER_TRACE_H_
#define SHARDING_FLAT_GATHER_TRACE_H_

#include <cstdint>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/trace/trace.h"

namespace tessera {

class GatherTrace {
 public:
  // `ahead`: before it was asked for.
  void Begin(bool ahead) {
    begun_ = TraceRecords() ? TraceNow() : 0;
    ahead_ = ahead;
  }
  // Its values are taken.
  void End(const std::string& unit, int64_t bytes) {
    const int64_t begun = std::exchange(begun_, 0);
    if (begun == 0 || bytes == 0) return;
    AddTraceSpan({TraceTrack::kGather, absl::StrCat("gather ", unit), begun,
                  TraceNow(), unit, bytes,
                  ahead_ ? "\"ahead\":true" : "\"ahead\":false"});
  }

 private:
  int64_t begun_ = 0;  // 0: nothing is recorded
  bool ahead_ = false;
};

}  // namespace tessera
#endif  // SHARDING_FLAT_GATHER_TRACE_H_
