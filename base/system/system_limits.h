// Says which of the system's limits was reached, and what raises it: the
// system's own words name none ("Resource temporarily unavailable").
#ifndef BASE_SYSTEM_SYSTEM_LIMITS_H_
#define BASE_SYSTEM_SYSTEM_LIMITS_H_

#include <cstdint>
#include <string>

namespace tessera {

// Returns this process's soft limit `which` (RLIMIT_AS, ...) in units of
// `unit`; "" where there is none.
std::string LimitText(int which, uint64_t unit);

// Says which limit made a call that needs a descriptor fail with `error`, an
// errno: "; this process may have 16 files open ...", or "" for other errors.
std::string DescriptorLimit(int error);

// Explains why 127.0.0.1 cannot be listened on or connected to, though nobody
// refuses it; `why` are the system's words.
std::string NoLoopback(const std::string& why);

}  // namespace tessera
#endif  // BASE_SYSTEM_SYSTEM_LIMITS_H_
