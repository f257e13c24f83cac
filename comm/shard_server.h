// ShardServer: lets ranks read each other's shards when they need them. Unlike
// an all-gather a read is not a collective: the computing threads of the other
// ranks take no part, so they may be anywhere, or wait for something else.
//
//   owner    SetVersion(4) ... writes its shards ... SetVersion(5)
//   reader          Pull(key, 5, whole) ---- waits ----> whole
//                      |                                  ^
//                      '--> io thread of each other rank -'
//
// A version is a count that all ranks keep (of steps, for example). A read gets
// exactly the version that it asks for. Owners must not change what they offer
// from SetVersion(v) until all pulls of version v have ended, on all ranks. The
// owner must learn of that from elsewhere (for example from a barrier; a rank
// that asks for v + 1 has no pull of v left). What changes it on a device's
// stream comes after OrderAfterReads.
//
// Messages go the same way from one rank to one other, without versions; the
// receiver asks for them, so it has the memory that they go to:
//
//   sender   Post(to, key, message) ... goes on
//   receiver        Take(from, key, message) --- waits ---> message
//
// Made by Communicator::ServeShards.
//
// Errors. A pull, or a take, fails with
//   Unavailable       a rank ended, or stopped serving, or announced a failure
//   DeadlineExceeded  a shard or message did not come within the collective
//                     timeout
//   InvalidArgument   it has another size at its owner than this rank expects
//   Internal          an owner is past the version
//   Cancelled         the server was destroyed here; this one fails no group
// As with a collective, the group is failed then, here and soon on all ranks,
// and its first failure ends all pulls and takes. A failed rank continues to
// serve others.
//
// Threads: all calls except the destructor may come from any thread. One thread
// for each server ("tessera-shards") moves all bytes.
#ifndef COMM_SHARD_SERVER_H_
#define COMM_SHARD_SERVER_H_

#include <cstdint>

#include "ATen/core/Tensor.h"
#include "comm/communicator.h"

namespace tessera {

class ShardServer {
 public:
  // Stops serving. Pulls and takes under way here end with Cancelled, those of
  // others that wait for this rank with Unavailable. Drops messages that are
  // not taken yet. LOCAL.
  virtual ~ShardServer() = default;

  // Offers `shard` for others to read as `key`, which means the same on all
  // ranks; it replaces an earlier offer. Any dtype and device; its memory must
  // stay valid while this lives. LOCAL. REQUIRES: contiguous.
  virtual void Offer(int64_t key, at::Tensor shard) = 0;

  // Declares that all that is offered here has `version` now; it is -1 before
  // the first call, when nothing may be read. Requests that came too early are
  // answered. What is offered on a device has that version when the caller's
  // current stream has done what it was given. LOCAL. REQUIRES: not less than
  // before.
  virtual void SetVersion(int64_t version) = 0;

  // Sets whole[p*S, (p+1)*S) to rank p's shard `key` at `version`, for every p;
  // S is whole.numel() / W. Waits where `key` is not offered yet, or `version`
  // not reached. LOCAL, ASYNC; receives S elements from each of W-1 ranks.
  // `whole` is contiguous, and its own slice may be what is offered here.
  // InvalidArgument, which fails no group, if that is not so or `version` is
  // negative.
  virtual CommFuture Pull(int64_t key, int64_t version, at::Tensor whole,
                          CommTag tag) = 0;

  // Offers `message` to rank `to` alone, once, as `key`: for one Take there.
  // Each pair of sender and receiver has keys of its own, apart from those of
  // Offer; a key may be used again once its message was taken. Any dtype and
  // device. The server holds the message until it is sent, and nobody may
  // change it any more; on a device it is what the caller's current stream has
  // written until now. Dropped where `to` cannot ask any more. LOCAL, ASYNC.
  // REQUIRES: contiguous; no message waits there as `key`.
  virtual void Post(int to, int64_t key, at::Tensor message) = 0;

  // Sets `message` to what rank `from` posts to this rank as `key`, which has
  // as many bytes. Waits where that is not posted yet. Several may be under
  // way, of different keys. LOCAL, ASYNC; receives message.nbytes().
  // InvalidArgument, which fails no group, if `message` is not contiguous,
  // `from` is no rank, or another take of `key` from there is under way.
  virtual CommFuture Take(int from, int64_t key, at::Tensor message,
                          CommTag tag) = 0;

  // Orders the caller's current stream after all reads, until now, of what is
  // offered or posted here on a device. LOCAL; does not wait.
  virtual void OrderAfterReads() = 0;

  // Ends this rank's pulls and takes: those under way end with Cancelled. It
  // continues to serve; the future ends when nobody can ask any more, since all
  // other servers have retired, were destroyed or ended, or when the group has
  // failed. LOCAL, ASYNC. Call it once.
  virtual CommFuture Retire() = 0;
};

}  // namespace tessera
#endif  // COMM_SHARD_SERVER_H_
