#include "base/system/system_limits.h"

#include <errno.h>
#include <sys/resource.h>

#include "absl/strings/str_cat.h"

namespace tessera {
std::string LimitText(int which, uint64_t unit) {
  rlimit limit = {};
  if (getrlimit(static_cast<decltype(RLIMIT_AS)>(which), &limit) != 0 ||
      limit.rlim_cur == RLIM_INFINITY) {
    return "";
  }
  return absl::StrCat(limit.rlim_cur / unit);
}

std::string DescriptorLimit(int error) {
  if (error == ENFILE) {
    return "; all processes of this host together have as many files open as "
           "fs.file-max allows: raise it (sysctl)";
  }
  if (error != EMFILE) return "";
  return absl::StrCat("; this process may have ", LimitText(RLIMIT_NOFILE, 1),
                      " files open: raise the limit (ulimit -n, or LimitNOFILE "
                      "of a service)");
}

std::string NoLoopback(const std::string& why) {
  return absl::StrCat(
      "this host's loopback cannot be used (127.0.0.1: ", why,
      "); bring it up (ip link set lo up; ip addr add 127.0.0.1/8 dev lo)");
}

}  // namespace tessera
