#include "base/system/process_end.h"

#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <utility>

namespace tessera {
namespace {

using Handler = std::function<void(ProcessEnd, int)>;

// Neither is destroyed: threads may come to the end while statics are.
std::mutex& Mutex() {
  static std::mutex& mutex = *new std::mutex;
  return mutex;
}
Handler& Installed() {
  static Handler& handler = *new Handler;
  return handler;
}

}  // namespace

void SetProcessEndHandler(Handler handler) {
  const std::lock_guard<std::mutex> lock(Mutex());
  Installed() = std::move(handler);
}

void EndProcess(ProcessEnd why, int code) {
  Handler handler;
  {
    const std::lock_guard<std::mutex> lock(Mutex());
    handler = Installed();
  }
  if (handler) {
    handler(why, code);
    if (why != ProcessEnd::kStuck) return;
  }
  if (why == ProcessEnd::kPlanned || why == ProcessEnd::kUsage) {
    std::exit(code);
  }
  if (why == ProcessEnd::kLaunched) std::fflush(nullptr);
  _exit(code);
}

}  // namespace tessera
