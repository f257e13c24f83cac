// Pipe: a ring of records from one rank to another, in the memory of the first.
// What they mean: channels.h.
//
//   written ->  [ record | payload | record | ............ ]  <- read
//
// Lock-free for one writer and one reader; Write and Read do not wait.
#ifndef COMM_SHM_PIPE_H_
#define COMM_SHM_PIPE_H_

#include <atomic>
#include <cstdint>

namespace tessera::shm {

// Messages up to here travel in the pipe.
inline constexpr int64_t kInlineBytes = 4 << 10;

struct Record {
  enum class Kind : uint32_t { kInline, kLong, kWasRead };
  Kind kind = Kind::kInline;
  int64_t tag = 0;
  uint64_t id = 0;  // counts the sender's long messages
  int64_t bytes = 0;
  int64_t offset = 0;  // of a long one, in the sender's heap

  int64_t payload_bytes() const { return kind == Kind::kInline ? bytes : 0; }
};

// All zero at first.
class Pipe {
 public:
  // `payload`: record.payload_bytes(). False if there is no room now.
  bool Write(const Record& record, const void* payload);
  // The next record; false if there is none. ReadPayload has to follow.
  bool Read(Record* record) const;
  void ReadPayload(const Record& record, void* payload);

  // The writer has given its messages up.
  void Break() { broken_.store(1); }
  bool broken() const { return broken_.load() != 0; }

 private:
  static constexpr int64_t kRingBytes = 32 << 10;
  void CopyIn(uint64_t at, const void* from, int64_t bytes);
  void CopyOut(uint64_t at, void* to, int64_t bytes) const;

  // Bytes, ever. Sequentially consistent: who sleeps looks at them (Door).
  alignas(64) std::atomic<uint64_t> written_;
  alignas(64) std::atomic<uint64_t> read_;
  alignas(64) std::atomic<uint64_t> broken_;
  alignas(64) char ring_[kRingBytes];
};

}  // namespace tessera::shm
#endif  // COMM_SHM_PIPE_H_
