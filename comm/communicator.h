// Communicator: the collectives of one group of ranks.
//
// Every collective of every Communicator of a process is issued by one thread,
// the communication thread, in the order in which it was called; so two ranks
// that call in the same order can never cross. A call returns at once with a
// CommFuture; Wait() blocks until the result may be read.
//
// Tensors of a device: a collective comes after what the caller's current
// stream has been given before the call, and runs on a stream of the
// communication thread's. No call here waits for a stream on the host.
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
#include "comm/shared_memory.h"

namespace tessera {

// The end of one collective. Copyable; a default-constructed one is done.
class CommFuture {
 public:
  struct State;  // comm/comm_thread.h

  CommFuture() = default;
  explicit CommFuture(std::shared_ptr<State> state)
      : state_(std::move(state)) {}

  // Blocks until the collective has ended here. Its tensors stay alive till
  // then. May be called more than once. Of tensors of a device: until the
  // communication thread has given it to the device, and what this thread's
  // current stream does from here on comes after it; whoever frees them waits
  // first. What the device fails at afterwards is an error of the next
  // collective, and what was read in between may be anything.
  absl::Status Wait() const;
  // Wait would not block here.
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
  // operation says, a sum as a reduction, an all-gather as a gather.
  WaitReason reason = WaitReason::kOther;
  // Called before the collective reads or writes its tensors here, on the
  // thread that issues it, which it may block: these come from elsewhere, a
  // disk say. An error of it is the collective's. Must not wait for a
  // collective (for what it may: comm/comm_promise.h). Empty: they are there.
  std::function<absl::Status()> ready;
};

struct Capabilities;  // comm/capabilities.h
struct CommCall;      // comm/comm_call.h
class NoteBoard;      // comm/note_board.h
class ShardServer;    // comm/shard_server.h

// How long an announcement stands before it ends the waits of others.
inline constexpr absl::Duration kAnnounceGrace = absl::Seconds(5);

class Communicator {
 public:
  virtual ~Communicator() = default;

  virtual int rank() const = 0;
  virtual int world_size() const = 0;
  // "shm", "gloo", ...; for messages. What depends on it asks capabilities.
  virtual absl::string_view backend() const = 0;
  virtual Capabilities capabilities() const;

  // whole[r*S, (r+1)*S) = rank r's shard, for every r. `shard` is [S], `whole`
  // is [W*S], both contiguous, same dtype and device. `shard` may be the own
  // slice of `whole`. COLLECTIVE, ASYNC; each rank sends S elements to W-1.
  CommFuture AllGather(at::Tensor shard, at::Tensor whole, CommTag tag);

  // shard = sum over ranks, in rank order, of their whole[rank*S, (rank+1)*S).
  // `whole` is [W*S] and is left as it was, unless `shard` is the own slice of
  // it (allowed). Each element is then divided by `divisor`, and rounded again;
  // that is each rank's own matter.
  // COLLECTIVE, ASYNC; each rank sends (W-1)*S elements.
  CommFuture ReduceScatterSum(at::Tensor whole, at::Tensor shard, CommTag tag,
                              double divisor = 1);

  // tensor = sum over ranks in rank order, the same bits on every rank and as
  // ReduceScatterSum gives. Contiguous, any numel. COLLECTIVE, ASYNC.
  CommFuture AllReduceSum(at::Tensor tensor, CommTag tag);

  // tensor = rank `root`'s tensor. Contiguous. COLLECTIVE, ASYNC.
  CommFuture Broadcast(at::Tensor tensor, int root, CommTag tag);

  // received[r*S, (r+1)*S) = rank r's sent[rank*S, (rank+1)*S), for every r.
  // Both are [W*S], contiguous, of one dtype and device, and apart.
  // COLLECTIVE, ASYNC; each rank sends S elements to each of W-1.
  CommFuture AllToAll(at::Tensor sent, at::Tensor received, CommTag tag);

  // Rank `to` receives `sent`, and `received` is what rank `from` has sent; -1:
  // nobody, and that tensor is not looked at. Both are contiguous, of one dtype
  // and device and of one size, the same on all ranks, and apart. All ranks of
  // the group call it, also those that give -1 twice; for two ranks alone make
  // a group of them (Split). REQUIRES: who is sent something by a rank receives
  // from that rank. COLLECTIVE, ASYNC; each rank sends S elements to one.
  CommFuture SendReceive(at::Tensor sent, int to, at::Tensor received, int from,
                         CommTag tag);
  // As SendReceive, where this rank only sends, or only receives.
  CommFuture Send(at::Tensor tensor, int to, CommTag tag) {
    return SendReceive(tensor, to, tensor, /*from=*/-1, std::move(tag));
  }
  CommFuture Receive(at::Tensor tensor, int from, CommTag tag) {
    return SendReceive(tensor, /*to=*/-1, tensor, from, std::move(tag));
  }

  // The strings of all ranks, in rank order; lengths may differ. COLLECTIVE,
  // blocking. For small control messages.
  absl::StatusOr<std::vector<std::string>> AllGatherStrings(
      absl::string_view mine, CommTag tag);

  // What the calls above come to: starts `call`, whose first part is set
  // (comm/comm_call.h). COLLECTIVE, ASYNC.
  virtual CommFuture Start(CommCall call, CommTag tag) = 0;

  // Tells the others, outside of any collective, that this rank has failed:
  // those that then wait for kAnnounceGrace more in a collective that this rank
  // has not come to (it is time to come to an agreement of all ranks) end their
  // wait with Unavailable, "rank 2 failed: <status's message>", and their
  // communicator is failed. LOCAL.
  virtual void Announce(const absl::Status& status) = 0;
  // After Announce: waits until every rank has announced a failure (all have
  // failed, so nobody waits in a collective). False if some have not within
  // `timeout`. LOCAL.
  virtual bool AllAnnounced(absl::Duration timeout) = 0;
  // Takes an announcement back (the failure was agreed on by all). LOCAL.
  virtual void ClearAnnouncement() = 0;

  // Returns the first (lowest rank's) error of all ranks' `mine`, with the rank
  // in its message, or OK if all are OK. Where it returns, all ranks return the
  // same. COLLECTIVE, blocking.
  absl::Status AgreeOk(const absl::Status& mine, absl::string_view where,
                       CallSite site = CallSite::Here());
  // Checks that `mine`, which a person can read, is the same text on all ranks.
  // Returns InvalidArgument, the same on all: "the <what> differs between rank
  // 0 (...) and rank 2 (...)". COLLECTIVE, blocking.
  absl::Status AgreeEqual(absl::string_view mine, absl::string_view what,
                          CallSite site = CallSite::Here());
  absl::Status Barrier(absl::string_view where,
                       CallSite site = CallSite::Here());

  // The ranks that give the same `color` become a group, ranked as here; it has
  // a backend of the same kind. `name` is for messages, which call ranks as
  // those of the group that was split first ("gradient of unit a of group
  // nodes 1.0: rank 3 has ended"). May be split again, and outlive this one.
  //
  // A group and what is split off it fail together: what a rank announces, it
  // announces to all of them, and the first failure of any is that of all.
  //
  // COLLECTIVE over this group, blocking. REQUIRES: no collective of these
  // ranks is in flight. Returns the same error on all ranks: of the first rank
  // whose new group could not be connected; Unimplemented if this group cannot
  // be split.
  virtual absl::StatusOr<std::shared_ptr<Communicator>> Split(int color,
                                                              CommTag name);

  // Memory of `bytes`, identical on all ranks, that all ranks of the group see.
  // COLLECTIVE, blocking. Returns the same error on all ranks: Unimplemented
  // where they do not share a host and its memory, Unavailable where the system
  // refuses it or `bytes` differ.
  virtual absl::StatusOr<std::unique_ptr<SharedMemory>> ShareMemory(
      int64_t bytes, CommTag tag);

  // Connects the ranks with each other, so that each can read the others'
  // shards when it likes, see comm/shard_server.h. The server keeps this group
  // alive; its pulls fail with the group, and the group with them. `tag` is for
  // messages. COLLECTIVE, blocking. Returns the same error on all ranks:
  // Unavailable if some cannot be connected; Unimplemented in a group of one.
  virtual absl::StatusOr<std::unique_ptr<ShardServer>> ServeShards(CommTag tag);

  // A board of notes for the group's ranks, see comm/note_board.h; it may
  // outlive this. COLLECTIVE, blocking. Returns the same error on all ranks:
  // Unavailable, Unimplemented.
  virtual absl::StatusOr<std::unique_ptr<NoteBoard>> ShareNotes(CommTag tag);

  // ---- what the collectives cost; see docs/communication.md ----

  // Tables by operation and by unit, and for whom this rank has waited: text
  // for people. LOCAL.
  virtual std::string Report() const { return ""; }
  // By rank: how long this rank's collectives were blocked until the first
  // message with that rank was through (gloo), or slept for that rank (shm),
  // its own entry 0. Peers are waited for one after the other, so each moment
  // is charged to one rank. Empty where the backend does not know (nccl).
  // LOCAL.
  virtual std::vector<absl::Duration> WaitedFor() const { return {}; }
  // By rank: how long all the others together have waited for it (the sum of
  // their WaitedFor). The slow rank is the one with much more than the others.
  // COLLECTIVE, blocking.
  absl::StatusOr<std::vector<absl::Duration>> WaitedForByAll(
      CallSite site = CallSite::Here());
};

}  // namespace tessera
#endif  // COMM_COMMUNICATOR_H_
