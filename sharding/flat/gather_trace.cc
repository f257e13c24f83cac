#include "sharding/flat/gather_trace.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "base/trace/trace.h"

namespace tessera {

void GatherTrace::Begin(bool ahead) {
  begun_ = TraceRecords() ? TraceNow() : 0;
  ahead_ = ahead;
}

void GatherTrace::End(const std::string& unit, int64_t bytes) {
  const int64_t begun = std::exchange(begun_, 0);
  if (begun == 0 || bytes == 0) return;
  AddTraceSpan({TraceTrack::kGather, absl::StrCat("gather ", unit), begun,
                TraceNow(), unit, bytes,
                ahead_ ? "\"ahead\":true" : "\"ahead\":false"});
}

}  // namespace tessera
