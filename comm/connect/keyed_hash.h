// Random bytes, and hashes that only those can compute who have the key
// (BLAKE2b, by libsodium). No torch.
//
// Threads: all calls may come from any thread.
#ifndef COMM_CONNECT_KEYED_HASH_H_
#define COMM_CONNECT_KEYED_HASH_H_

#include <cstddef>
#include <initializer_list>
#include <string>

#include "absl/strings/string_view.h"

namespace tessera {

inline constexpr size_t kHashBytes = 32;

// From the system; nobody can guess them.
std::string RandomBytes(size_t count);
// 32 hex digits, of as many random bytes as 16.
std::string RandomToken();

// kHashBytes. The parts are told apart: "a", "bc" is not "ab", "c". A key may
// have any length; an empty one is no secret.
std::string KeyedHash(absl::string_view key,
                      std::initializer_list<absl::string_view> parts);

// Takes as long for texts of equal length, whatever they are: else the time
// that a wrong one takes would tell how many of its first bytes are right.
bool SameHash(absl::string_view a, absl::string_view b);

}  // namespace tessera
#endif  // COMM_CONNECT_KEYED_HASH_H_
