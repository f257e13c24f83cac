// Why there is a meeting on the hosts in each chunk: to await a mark is to
// await what it stood for at the time of the call. Without the meeting a rank
// could await a mark that its owner has yet to record, and would then read what
// is not written. The reads of a slot need no meeting of their own: a rank
// records that it has read chunk k - 2 before it comes to the meeting of chunk
// k - 1, which this one has left when it writes chunk k.
//
// Why nothing of this waits for ever: each wait of a stream is for work that
// was given to a stream before the wait was, by the clock of the host. So there
// is no cycle, however streams are laid on queues of the hardware, as long as
// every process lives.
//
// Why marks are of one slot each: the next record of a mark comes two chunks,
// and so a whole meeting, after all waits for the last one were given. Each
// wait is for one record that is known, not for one of two.
#include "comm/cuda_ipc/slot_exchange.h"

#include <algorithm>
#include <utility>

#include "base/status.h"

namespace tessera {
namespace {

using Mark = PeerMemory::Mark;

// Parts of a slot begin there: copies of devices are fast at such addresses.
constexpr int64_t kPartAlignment = 256;

absl::Status ForChunks(
    int64_t bytes, int64_t most,
    const std::function<absl::Status(int64_t at, int64_t n)>& each) {
  for (int64_t at = 0; at < bytes; at += most) {
    TESSERA_RETURN_IF_ERROR(each(at, std::min(most, bytes - at)));
  }
  return absl::OkStatus();
}

}  // namespace

SlotExchange::SlotExchange(PeerMemory* memory, Meeting meet)
    : memory_(memory), meet_(std::move(meet)) {}

absl::Status SlotExchange::ForOthers(
    const std::function<absl::Status(int rank)>& each) {
  const int size = memory_->world_size();
  for (int step = 1; step < size; ++step) {
    TESSERA_RETURN_IF_ERROR(each((memory_->rank() + step) % size));
  }
  return absl::OkStatus();
}

absl::Status SlotExchange::Run(const Chunk& chunk) {
  const int slot = static_cast<int>(chunks_++ % PeerMemory::kSlots);
  if (chunk.writes) {
    TESSERA_RETURN_IF_ERROR(ForOthers(
        [&](int rank) { return memory_->Await(rank, Mark::kRead, slot); }));
    TESSERA_RETURN_IF_ERROR(chunk.put(slot));
    TESSERA_RETURN_IF_ERROR(memory_->Record(Mark::kWritten, slot));
  }
  TESSERA_RETURN_IF_ERROR(meet_());
  if (chunk.only_from == memory_->rank()) return absl::OkStatus();
  TESSERA_RETURN_IF_ERROR(ForOthers([&](int rank) -> absl::Status {
    if (chunk.only_from >= 0 && rank != chunk.only_from) {
      return absl::OkStatus();
    }
    TESSERA_RETURN_IF_ERROR(memory_->Await(rank, Mark::kWritten, slot));
    return chunk.get(rank, slot);
  }));
  return memory_->Record(Mark::kRead, slot);
}

absl::Status SlotExchange::AllGather(const char* in, int64_t bytes, char* out) {
  char* const own = out + memory_->rank() * bytes;
  if (in != own) TESSERA_RETURN_IF_ERROR(memory_->Copy(in, own, bytes));
  return ForChunks(
      bytes, memory_->slot_bytes(), [&](int64_t at, int64_t n) -> absl::Status {
        Chunk chunk;
        chunk.put = [&](int slot) { return memory_->Put(in + at, slot, 0, n); };
        chunk.get = [&](int rank, int slot) {
          return memory_->Get(rank, slot, 0, out + rank * bytes + at, n);
        };
        return Run(chunk);
      });
}

absl::Status SlotExchange::AllToAll(absl::Span<const char* const> in,
                                    int64_t bytes,
                                    absl::Span<char* const> out) {
  const int me = memory_->rank();
  if (in[me] != nullptr && out[me] != nullptr) {
    TESSERA_RETURN_IF_ERROR(memory_->Copy(in[me], out[me], bytes));
  }
  // A slot holds a part for each rank.
  int64_t part = memory_->slot_bytes() / memory_->world_size();
  if (part > kPartAlignment) part -= part % kPartAlignment;
  return ForChunks(bytes, part, [&](int64_t at, int64_t n) -> absl::Status {
    Chunk chunk;
    chunk.put = [&](int slot) {
      return ForOthers([&](int rank) {
        return in[rank] == nullptr
                   ? absl::OkStatus()
                   : memory_->Put(in[rank] + at, slot, rank * part, n);
      });
    };
    chunk.get = [&](int rank, int slot) {
      return out[rank] == nullptr
                 ? absl::OkStatus()
                 : memory_->Get(rank, slot, me * part, out[rank] + at, n);
    };
    return Run(chunk);
  });
}

absl::Status SlotExchange::Broadcast(char* data, int64_t bytes, int root) {
  return ForChunks(bytes, memory_->slot_bytes(),
                   [&](int64_t at, int64_t n) -> absl::Status {
                     Chunk chunk;
                     chunk.writes = memory_->rank() == root;
                     chunk.only_from = root;
                     chunk.put = [&](int slot) {
                       return memory_->Put(data + at, slot, 0, n);
                     };
                     chunk.get = [&](int rank, int slot) {
                       return memory_->Get(rank, slot, 0, data + at, n);
                     };
                     return Run(chunk);
                   });
}

}  // namespace tessera
