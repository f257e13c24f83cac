#include "comm/shm/pipe.h"

#include <algorithm>
#include <cstring>

namespace tessera::shm {
namespace {

// Records and payloads lie at multiples of this.
constexpr int64_t kAlign = 16;
constexpr int64_t Aligned(int64_t bytes) {
  return (bytes + kAlign - 1) / kAlign * kAlign;
}
constexpr int64_t kRecordBytes = Aligned(sizeof(Record));

}  // namespace

void Pipe::CopyIn(uint64_t at, const void* from, int64_t bytes) {
  if (bytes == 0) return;
  const auto begin = static_cast<int64_t>(at % kRingBytes);
  const int64_t first = std::min(bytes, kRingBytes - begin);
  std::memcpy(ring_ + begin, from, first);
  std::memcpy(ring_, static_cast<const char*>(from) + first, bytes - first);
}

void Pipe::CopyOut(uint64_t at, void* to, int64_t bytes) const {
  if (bytes == 0) return;
  const auto begin = static_cast<int64_t>(at % kRingBytes);
  const int64_t first = std::min(bytes, kRingBytes - begin);
  std::memcpy(to, ring_ + begin, first);
  std::memcpy(static_cast<char*>(to) + first, ring_, bytes - first);
}

bool Pipe::Write(const Record& record, const void* payload) {
  const int64_t needed = kRecordBytes + Aligned(record.payload_bytes());
  const uint64_t written = written_.load();
  if (static_cast<int64_t>(written - read_.load()) + needed > kRingBytes) {
    return false;
  }
  CopyIn(written, &record, sizeof(record));
  CopyIn(written + kRecordBytes, payload, record.payload_bytes());
  written_.store(written + needed);
  return true;
}

bool Pipe::Read(Record* record) const {
  const uint64_t read = read_.load();
  if (read == written_.load()) return false;
  CopyOut(read, record, sizeof(*record));
  return true;
}

void Pipe::ReadPayload(const Record& record, void* payload) {
  const uint64_t read = read_.load();
  CopyOut(read + kRecordBytes, payload, record.payload_bytes());
  read_.store(read + kRecordBytes + Aligned(record.payload_bytes()));
}

}  // namespace tessera::shm
