#include "base/trace/exposed.h"

#include <array>
#include <atomic>
#include <cstddef>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "base/monotonic.h"
#include "base/thread/start_thread.h"
#include "base/trace/trace.h"

namespace tessera {
namespace {

std::array<std::atomic<int64_t>, kNumWaitReasons> g_exposed{};

}  // namespace

absl::string_view WaitReasonName(WaitReason reason) {
  switch (reason) {
    case WaitReason::kGather:
      return "gather";
    case WaitReason::kReduction:
      return "reduction";
    case WaitReason::kAgreement:
      return "agreement";
    case WaitReason::kPublish:
      return "publish";
    case WaitReason::kOther:
      return "other";
    case WaitReason::kUpdate:
      return "update";
    case WaitReason::kDisk:
      return "disk";
  }
  return "";
}

int64_t ExposedNanos(WaitReason reason) {
  return g_exposed[static_cast<size_t>(reason)].load(std::memory_order_relaxed);
}

int64_t ExposedCommNanos() {
  int64_t sum = 0;
  for (int i = 0; i < kNumCommReasons; ++i) {
    sum += ExposedNanos(static_cast<WaitReason>(i));
  }
  return sum;
}

void NoteExposedWait(WaitReason reason, absl::string_view what, int64_t begin,
                     int64_t end) {
  g_exposed[static_cast<size_t>(reason)].fetch_add(end - begin,
                                                   std::memory_order_relaxed);
  if (!TraceRecords()) return;
  AddTraceSpan({TraceTrack::kMain, absl::StrCat("wait: ", what), begin, end,
                std::string(UnitInText(what)), /*bytes=*/-1,
                absl::StrCat("\"wait\":\"", WaitReasonName(reason), "\"")});
}

bool WaitsAreExposed() { return !StartedByTessera(); }

int64_t TraceNow() { return absl::ToInt64Nanoseconds(MonotonicNow()); }

}  // namespace tessera
