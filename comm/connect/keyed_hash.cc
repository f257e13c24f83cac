#include "comm/connect/keyed_hash.h"

#include <sodium.h>

#include <cstdint>

#include "absl/strings/escaping.h"
#include "base/check.h"

namespace tessera {
namespace {

static_assert(kHashBytes == crypto_generichash_BYTES);
static_assert(kHashBytes == crypto_generichash_KEYBYTES);

const unsigned char* Bytes(absl::string_view text) {
  return reinterpret_cast<const unsigned char*>(text.data());
}

unsigned char* Bytes(std::string& text) {
  return reinterpret_cast<unsigned char*>(&text[0]);
}

void Initialize() {
  static const bool ready = sodium_init() >= 0;
  TESSERA_CHECK(ready) << "libsodium cannot be used here";
}

}  // namespace

std::string RandomBytes(size_t count) {
  Initialize();
  std::string bytes(count, 0);
  randombytes_buf(&bytes[0], count);
  return bytes;
}

std::string RandomToken() { return absl::BytesToHexString(RandomBytes(16)); }

std::string KeyedHash(absl::string_view key,
                      std::initializer_list<absl::string_view> parts) {
  Initialize();
  std::string short_key(kHashBytes, 0);
  crypto_generichash(Bytes(short_key), kHashBytes, Bytes(key), key.size(),
                     nullptr, 0);
  crypto_generichash_state state;
  crypto_generichash_init(&state, Bytes(short_key), kHashBytes, kHashBytes);
  for (absl::string_view part : parts) {
    const uint64_t size = part.size();
    crypto_generichash_update(
        &state, reinterpret_cast<const unsigned char*>(&size), sizeof(size));
    crypto_generichash_update(&state, Bytes(part), part.size());
  }
  std::string hash(kHashBytes, 0);
  crypto_generichash_final(&state, Bytes(hash), kHashBytes);
  return hash;
}

bool SameHash(absl::string_view a, absl::string_view b) {
  return a.size() == b.size() &&
         sodium_memcmp(a.data(), b.data(), a.size()) == 0;
}

}  // namespace tessera
