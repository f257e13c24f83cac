// Makes random bytes, and hashes that only holders of the key can compute
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

// Returns bytes from the system's generator, which nobody can guess.
std::string RandomBytes(size_t count);
// Returns 32 hex digits of 16 random bytes.
std::string RandomToken();

// Returns a hash of kHashBytes. The borders of the parts count: "a", "bc" is
// not "ab", "c". A key may have any length; an empty one is no secret.
std::string KeyedHash(absl::string_view key,
                      std::initializer_list<absl::string_view> parts);

// Compares hashes in a time that depends only on their length: otherwise the
// time would reveal how many of the first bytes are right.
bool SameHash(absl::string_view a, absl::string_view b);

}  // namespace tessera
#endif  // COMM_CONNECT_KEYED_HASH_H_
