#include "comm/communicator.h"

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "base/status.h"
#include "comm/capabilities.h"
#include "comm/comm_call.h"
#include "comm/note_board.h"
#include "comm/shard_server.h"
#include "comm/shared_memory.h"

namespace tessera {

Capabilities Communicator::capabilities() const { return {}; }

CommFuture Communicator::AllGather(at::Tensor shard, at::Tensor whole,
                                   CommTag tag) {
  CommCall call;
  call.op = CollectiveOp::kAllGather;
  call.in = std::move(shard);
  call.out = std::move(whole);
  return Start(std::move(call), std::move(tag));
}

CommFuture Communicator::ReduceScatterSum(at::Tensor whole, at::Tensor shard,
                                          CommTag tag, double divisor) {
  CommCall call;
  call.op = CollectiveOp::kReduceScatter;
  call.in = std::move(whole);
  call.out = std::move(shard);
  call.divisor = divisor;
  return Start(std::move(call), std::move(tag));
}

CommFuture Communicator::AllReduceSum(at::Tensor tensor, CommTag tag) {
  CommCall call;
  call.op = CollectiveOp::kAllReduce;
  call.out = std::move(tensor);
  return Start(std::move(call), std::move(tag));
}

CommFuture Communicator::Broadcast(at::Tensor tensor, int root, CommTag tag) {
  CommCall call;
  call.op = CollectiveOp::kBroadcast;
  call.out = std::move(tensor);
  call.root = root;
  return Start(std::move(call), std::move(tag));
}

CommFuture Communicator::AllToAll(at::Tensor sent, at::Tensor received,
                                  CommTag tag) {
  CommCall call;
  call.op = CollectiveOp::kAllToAll;
  call.in = std::move(sent);
  call.out = std::move(received);
  return Start(std::move(call), std::move(tag));
}

CommFuture Communicator::SendReceive(at::Tensor sent, int to,
                                     at::Tensor received, int from,
                                     CommTag tag) {
  CommCall call;
  call.op = CollectiveOp::kSendReceive;
  call.in = std::move(sent);
  call.out = std::move(received);
  call.to = to;
  call.from = from;
  return Start(std::move(call), std::move(tag));
}

absl::StatusOr<std::vector<std::string>> Communicator::AllGatherStrings(
    absl::string_view mine, CommTag tag) {
  std::vector<std::string> all;
  CommCall call;
  call.text = std::string(mine);
  call.texts = &all;
  TESSERA_RETURN_IF_ERROR(Start(std::move(call), std::move(tag)).Wait());
  return all;
}

absl::Status Communicator::AgreeOk(const absl::Status& mine,
                                   absl::string_view where, CallSite site) {
  if (world_size() == 1) return mine;
  absl::StatusOr<std::vector<std::string>> all =
      AllGatherStrings(StatusToText(mine), CommTag(std::string(where), site));
  if (!all.ok()) {
    if (mine.ok()) return all.status();
    // The own error is nearer to the cause than that nobody could be told.
    return absl::Status(
        mine.code(), absl::StrCat(mine.message(), " (the other ranks were not ",
                                  "told: ", all.status().message(), ")"));
  }
  for (int r = 0; r < world_size(); ++r) {
    const absl::Status theirs = StatusFromText((*all)[r]);
    if (!theirs.ok()) {
      return Annotate(theirs, absl::StrCat("[", where, "] rank ", r));
    }
  }
  return absl::OkStatus();
}

absl::Status Communicator::AgreeEqual(absl::string_view mine,
                                      absl::string_view what, CallSite site) {
  TESSERA_ASSIGN_OR_RETURN(
      const auto all,
      AllGatherStrings(
          mine, CommTag(absl::StrCat("comparison of the ", what), site)));
  for (size_t rank = 1; rank < all.size(); ++rank) {
    if (all[rank] == all[0]) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("the ", what, " differs between rank 0 (", all[0],
                     ") and rank ", rank, " (", all[rank], ")"));
  }
  return absl::OkStatus();
}

absl::Status Communicator::Barrier(absl::string_view where, CallSite site) {
  return AllGatherStrings("", CommTag(std::string(where), site)).status();
}

absl::StatusOr<std::shared_ptr<Communicator>> Communicator::Split(
    int /*color*/, CommTag name) {
  return absl::UnimplementedError(absl::StrCat(
      name.what, ": a group of backend ", backend(), " cannot be split"));
}

absl::StatusOr<std::unique_ptr<SharedMemory>> Communicator::ShareMemory(
    int64_t /*bytes*/, CommTag tag) {
  return absl::UnimplementedError(absl::StrCat(
      tag.what, ": the ranks of backend ", backend(), " share no memory"));
}

absl::StatusOr<std::unique_ptr<NoteBoard>> Communicator::ShareNotes(
    CommTag tag) {
  return absl::UnimplementedError(absl::StrCat(
      tag.what, ": a group of backend ", backend(), " has no notes"));
}

absl::StatusOr<std::unique_ptr<ShardServer>> Communicator::ServeShards(
    CommTag tag) {
  return absl::UnimplementedError(absl::StrCat(
      tag.what, ": a group of backend ", backend(), " serves no shards"));
}

absl::StatusOr<std::vector<absl::Duration>> Communicator::WaitedForByAll(
    CallSite site) {
  std::vector<int64_t> mine;
  for (absl::Duration waited : WaitedFor()) {
    mine.push_back(absl::ToInt64Nanoseconds(waited));
  }
  TESSERA_ASSIGN_OR_RETURN(
      const std::vector<std::string> all,
      AllGatherStrings(absl::StrJoin(mine, " "),
                       CommTag("who waited for whom", site)));
  std::vector<absl::Duration> sums(world_size());
  for (const std::string& text : all) {
    const std::vector<absl::string_view> parts =
        absl::StrSplit(text, ' ', absl::SkipEmpty());
    for (size_t r = 0; r < parts.size() && r < sums.size(); ++r) {
      int64_t ns = 0;
      if (absl::SimpleAtoi(parts[r], &ns)) sums[r] += absl::Nanoseconds(ns);
    }
  }
  return sums;
}

}  // namespace tessera
