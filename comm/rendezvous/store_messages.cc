#include "comm/rendezvous/store_messages.h"

#include <cstdint>
#include <cstring>

namespace tessera {
namespace {

constexpr size_t kSizeBytes = sizeof(uint32_t);

void AppendSize(size_t size, std::string* out) {
  const auto value = static_cast<uint32_t>(size);
  out->append(reinterpret_cast<const char*>(&value), kSizeBytes);
}

// Takes a size from the front. False: there is none.
bool TakeSize(absl::string_view* in, size_t* size) {
  uint32_t value = 0;
  if (in->size() < kSizeBytes) return false;
  memcpy(&value, in->data(), kSizeBytes);
  in->remove_prefix(kSizeBytes);
  *size = value;
  return true;
}

bool Decode(absl::string_view in, StoreMessage* message) {
  size_t count = 0;
  if (!TakeSize(&in, &count) || count > in.size() / kSizeBytes) return false;
  message->clear();
  for (size_t i = 0; i < count; ++i) {
    size_t size = 0;
    if (!TakeSize(&in, &size) || size > in.size()) return false;
    message->emplace_back(in.substr(0, size));
    in.remove_prefix(size);
  }
  return in.empty() && count > 0;
}

}  // namespace

std::string EncodeFrame(const StoreMessage& message) {
  size_t size = kSizeBytes;
  for (const std::string& field : message) size += kSizeBytes + field.size();
  std::string out;
  out.reserve(kSizeBytes + size);
  AppendSize(size, &out);
  AppendSize(message.size(), &out);
  for (const std::string& field : message) {
    AppendSize(field.size(), &out);
    out += field;
  }
  return out;
}

Decoded TakeFrame(std::string* in, StoreMessage* message) {
  absl::string_view rest = *in;
  size_t size = 0;
  if (!TakeSize(&rest, &size)) return Decoded::kIncomplete;
  if (size > kMaxStoreMessage) return Decoded::kNonsense;
  if (rest.size() < size) return Decoded::kIncomplete;
  if (!Decode(rest.substr(0, size), message)) return Decoded::kNonsense;
  in->erase(0, kSizeBytes + size);
  return Decoded::kMessage;
}

}  // namespace tessera
