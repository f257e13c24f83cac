// Communicator: the collectives of one group of ranks.
//
// Every collective of every Communicator of a process is issued by one thread,
// the communication thread, in the order in which it was called; so two ranks
// that call in the same order can never cross. A call returns at once with a
// CommFuture; Wait() blocks until the result may be read.
//
// With tensors of a device a collective is ordered after the caller's current
// stream at the time of the call, and runs on a stream of the communication
// thread. No call here makes the host wait for a stream.
//
// Sums are taken in rank order (rank 0 + rank 1 + ...), in the tensor's own
// dtype (float16 and bfloat16 in float32, rounded once), so the result has the
// same bits on every rank, at every chunking and on every backend (NCCL's own
// sums, in an order of its own, are an option).
//
// Errors. A collective fails with
//   Unavailable       a peer ended, or announced a failure (in its words)
//   DeadlineExceeded  a peer did not come within the timeout
// After the first failure the communicator is failed: every later call returns
// the same Status, on all ranks that take part.
//
// Threads: all calls may come from any thread.
#ifndef COMM_COMMUNICATOR_H_
#define COMM_COMMUNICATOR_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "base/trace/exposed.h"
#include "comm/call_site.h"

namespace tessera {

// CommFuture: a future for the end of one collective. Copyable; a
// default-constructed one is done.
class CommFuture {
 public:
  struct State;  // comm/comm_thread.h

  CommFuture() = default;
  explicit CommFuture(std::shared_ptr<State> state)
      : state_(std::move(state)) {}

  // Blocks until the collective has ended on this rank; its tensors stay alive
  // until then. May be called more than once. With tensors of a device, blocks
  // until the communication thread has given the collective to the device, and
  // orders this thread's current stream after it; wait before freeing the
  // tensors. If the device fails afterwards, the next collective returns the
  // error, and values read in between are undefined.
  absl::Status Wait() const;
  // Whether Wait would return at once.
  bool Done() const;
  // False for a default-constructed one, which has nothing to wait for.
  bool valid() const { return state_ != nullptr; }

 private:
  std::shared_ptr<State> state_;
};

// What a collective is for; appears in error messages ("reduce-scatter of unit
// layers.3"). Copied; no lifetime requirement. Remembers where in the source it
// was made: write CommTag{"..."} or {"..."} at the call.
struct CommTag {
  CommTag(std::string what = "",  // NOLINT: {"..."} makes one
          CallSite site = CallSite::Here())
      : what(std::move(what)), site(site) {}
  // Makes waits for the call count for this reason (base/trace/exposed.h).
  CommTag For(WaitReason why) && {
    reason = why;
    return std::move(*this);
  }
  std::string what;
  CallSite site;
  // What a wait for it counts as (base/trace/exposed.h); kOther: as its
  // operation says: a sum as a reduction, an all-gather as a gather.
  WaitReason reason = WaitReason::kOther;
  // Called before the collective reads or writes its tensors on this rank, on
  // the thread that issues it, which it may block: for tensors that come from
  // elsewhere, such as a disk. Its error is the collective's. It must not wait
  // for a collective (comm/comm_promise.h says what it may wait for). Empty:
  // the tensors are there.
  std::function<absl::Status()> ready;
};

struct Capabilities;  // comm/capabilities.h
struct CommCall;      // comm/comm_call.h
class NoteBoard;      // comm/note_board.h
class ShardServer;    // comm/shard_server.h
class SharedMemory;   // comm/shared_memory.h

// How long an announcement stands before it ends the waits of others.
inline constexpr absl::Duration kAnnounceGrace = absl::Seconds(5);

class Communicator {
 public:
  virtual ~Communicator() = default;

  virtual int rank() const = 0;
  virtual int world_size() const = 0;
  // The backend's name for messages: "shm", "gloo", ... Code that depends on
  // the backend checks capabilities().
  virtual absl::string_view backend() const = 0;
  virtual Capabilities capabilities() const;

  // Sets whole[r*S, (r+1)*S) to rank r's shard, for every r. `shard` is [S],
  // `whole` is [W*S], both contiguous, same dtype and device. `shard` may be
  // the own slice of `whole`. COLLECTIVE, ASYNC; each rank sends S elements to
  // W-1.
  CommFuture AllGather(at::Tensor shard, at::Tensor whole, CommTag tag);

  // Sets `shard` to the sum over ranks, in rank order, of their whole[rank*S,
  // (rank+1)*S). `whole` is [W*S] and is left as it was, unless `shard` is this
  // rank's slice of it (allowed). Each element is then divided by `divisor` and
  // rounded again; ranks may have different divisors. COLLECTIVE, ASYNC; each
  // rank sends (W-1)*S elements.
  CommFuture ReduceScatterSum(at::Tensor whole, at::Tensor shard, CommTag tag,
                              double divisor = 1);

  // Sets `tensor` to the sum over ranks in rank order, with the same bits on
  // every rank and as ReduceScatterSum gives. Contiguous, any numel.
  // COLLECTIVE, ASYNC.
  CommFuture AllReduceSum(at::Tensor tensor, CommTag tag);

  // Sets `tensor` to rank `root`'s tensor. Contiguous. COLLECTIVE, ASYNC.
  CommFuture Broadcast(at::Tensor tensor, int root, CommTag tag);

  // Sets received[r*S, (r+1)*S) to rank r's sent[rank*S, (rank+1)*S), for every
  // r. Both are [W*S], contiguous, of one dtype and device, and do not overlap.
  // COLLECTIVE, ASYNC; each rank sends S elements to each of W-1.
  CommFuture AllToAll(at::Tensor sent, at::Tensor received, CommTag tag);

  // Sends `sent` to rank `to`, and sets `received` to what rank `from` has
  // sent; -1: nobody, and that tensor is not looked at. Both are contiguous, of
  // one dtype, device and size, identical on all ranks, and do not overlap. All
  // ranks of the group call it, also those that give -1 twice; for two ranks
  // only, make a group of them (Split). REQUIRES: a rank that is sent something
  // receives from that rank. COLLECTIVE, ASYNC; each rank sends S elements to
  // one.
  CommFuture SendReceive(at::Tensor sent, int to, at::Tensor received, int from,
                         CommTag tag);
  // As SendReceive, where this rank only sends, or only receives.
  CommFuture Send(at::Tensor tensor, int to, CommTag tag) {
    return SendReceive(tensor, to, tensor, /*from=*/-1, std::move(tag));
  }
  CommFuture Receive(at::Tensor tensor, int from, CommTag tag) {
    return SendReceive(tensor, /*to=*/-1, tensor, from, std::move(tag));
  }

  // Returns the strings of all ranks, in rank order; lengths may differ. For
  // small control messages. COLLECTIVE, blocking.
  absl::StatusOr<std::vector<std::string>> AllGatherStrings(
      absl::string_view mine, CommTag tag);

  // Carries out the calls above: starts `call`, whose first part is set
  // (comm/comm_call.h). COLLECTIVE, ASYNC.
  virtual CommFuture Start(CommCall call, CommTag tag) = 0;

  // Announces to the other ranks, outside of any collective, that this rank has
  // failed. Ranks that wait for another kAnnounceGrace in a collective that
  // this rank has not reached (which leaves it time to reach an agreement of
  // all ranks) end their wait with Unavailable, "rank 2 failed: <status's
  // message>", and their communicator is failed. LOCAL.
  virtual void Announce(const absl::Status& status) = 0;
  // Waits, after Announce, until every rank has announced a failure, so that
  // nobody waits in a collective. Returns false if some have not within
  // `timeout`. LOCAL.
  virtual bool AllAnnounced(absl::Duration timeout) = 0;
  // Withdraws an announcement, once all ranks have agreed on the failure.
  // LOCAL.
  virtual void ClearAnnouncement() = 0;

  // Returns the first (lowest rank's) error of all ranks' `mine`, with the rank
  // in its message, or OK if all are OK. All ranks return the same. COLLECTIVE,
  // blocking.
  absl::Status AgreeOk(const absl::Status& mine, absl::string_view where,
                       CallSite site = CallSite::Here());
  // Checks that `mine`, which should be readable, is the same text on all
  // ranks. Returns InvalidArgument, identical on all ranks: "the <what> differs
  // between rank 0 (...) and rank 2 (...)". COLLECTIVE, blocking.
  absl::Status AgreeEqual(absl::string_view mine, absl::string_view what,
                          CallSite site = CallSite::Here());
  absl::Status Barrier(absl::string_view where,
                       CallSite site = CallSite::Here());

  // Makes a group of the ranks that give the same `color`, in the same order;
  // it has a backend of the same kind. `name` is for messages, which number
  // ranks as in the group that was split first ("gradient of unit a of group
  // nodes 1.0: rank 3 has ended"). The new group may be split again, and
  // outlive this one.
  //
  // A group and groups that are split off it fail together: a rank's
  // announcements go to all of them, and the first failure of any fails all.
  //
  // COLLECTIVE over this group, blocking. REQUIRES: no collective of these
  // ranks is in flight. Returns the same error on all ranks: of the first rank
  // whose new group could not be connected; Unimplemented if this group cannot
  // be split.
  virtual absl::StatusOr<std::shared_ptr<Communicator>> Split(int color,
                                                              CommTag name);

  // Makes memory of `bytes` (identical on all ranks) that all ranks of the
  // group share. COLLECTIVE, blocking. Returns the same error on all ranks:
  // Unimplemented where they do not share a host and its memory, Unavailable
  // where the system refuses it or `bytes` differ.
  virtual absl::StatusOr<std::unique_ptr<SharedMemory>> ShareMemory(
      int64_t bytes, CommTag tag);

  // Connects the ranks with each other, so that each can read the others'
  // shards at any time, see comm/shard_server.h. The server keeps this group
  // alive; its pulls fail with the group, and the group with them. `tag` is for
  // messages. COLLECTIVE, blocking. Returns the same error on all ranks:
  // Unavailable if some cannot be connected; Unimplemented in a group of one.
  virtual absl::StatusOr<std::unique_ptr<ShardServer>> ServeShards(CommTag tag);

  // Makes a board of notes for the group's ranks, see comm/note_board.h; it may
  // outlive this. COLLECTIVE, blocking. Returns the same error on all ranks:
  // Unavailable, Unimplemented.
  virtual absl::StatusOr<std::unique_ptr<NoteBoard>> ShareNotes(CommTag tag);

  // ---- what the collectives cost; see docs/communication.md ----

  // Returns tables by operation and by unit, and of the ranks that this rank
  // has waited for, as text for people. LOCAL.
  virtual std::string Report() const { return ""; }
  // Returns, by rank, how long this rank's collectives were blocked until the
  // first message with that rank was through (gloo), or slept for that rank
  // (shm); its own entry is 0. Peers are waited for one after the other, so
  // each moment is charged to one rank. Empty where the backend does not know
  // (nccl). LOCAL.
  virtual std::vector<absl::Duration> WaitedFor() const { return {}; }
  // Returns, by rank, how long all other ranks together have waited for it (the
  // sum of their WaitedFor): a slow rank has much more than the others.
  // COLLECTIVE, blocking.
  absl::StatusOr<std::vector<absl::Duration>> WaitedForByAll(
      CallSite site = CallSite::Here());
};

}  // namespace tessera
#endif  // COMM_COMMUNICATOR_H_
