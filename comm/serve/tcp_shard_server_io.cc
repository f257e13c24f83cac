// What runs on the threads "tessera-shards" and "tessera-watch".
//
// Why only "tessera-shards" ends pulls: whoever ends one gives its memory back
// to the caller, and only that thread knows that no bytes are being received
// into it just now. So the watching thread leaves its verdict and wakes it.
//
// Why shards of a device are read here and now, which waits for the device: the
// answer is bytes of host memory. What the device has been given ends without
// this thread: collectives are given to it by the communication threads alone.
//
// Why a failed pull fails the whole group: its rank cannot go on, and the
// others will wait for it in some collective; they are to be told the cause
// now.
//
// Why a second answer of one rank is an error, and too many requests close the
// connection: an answer that counts for another rank's would end a pull whose
// shards are not all there, and requests that wait are kept without a limit of
// their own.
#include <sys/eventfd.h>

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "base/monotonic.h"
#include "base/status.h"
#include "base/stream/stream_uses.h"
#include "base/torch_guard.h"
#include "c10/core/GradMode.h"
#include "comm/group/comm_stream.h"
#include "comm/serve/tcp_shard_server.h"

namespace tessera {
namespace {

// The most requests of one rank that wait for a version or to be sent. No rank
// of ours has so many pulls under way.
constexpr int64_t kMaxRequests = 1 << 16;

// "unit a #7 (pull, 64 bytes of float32)"
std::string NameOf(const CollectiveRecord& record) {
  return absl::StrCat(record.Title(), " #", record.sequence, " (",
                      record.Describe(), ")");
}

}  // namespace

// ---- on tessera-shards ----

void TcpShardServer::Run() {
  c10::AutoGradMode no_grad(false);
  std::vector<pollfd> fds;
  while (true) {
    FillPoll(&fds);
    if (poll(fds.data(), fds.size(), -1) < 0) continue;
    if (fds[0].revents != 0) {
      eventfd_t count = 0;
      (void)eventfd_read(wake_fd_, &count);
      if (!TakeNews()) break;
    }
    for (int r = 0; r < world_size_; ++r) {
      if (r != rank_) Turn(r, fds[1 + 2 * r].revents, fds[2 + 2 * r].revents);
    }
  }
  EndAll(absl::CancelledError("the shard server was destroyed"));
  EndRetirement();
  peers_.clear();
}

void TcpShardServer::FillPoll(std::vector<pollfd>* fds) const {
  fds->assign({{wake_fd_, POLLIN, 0}});
  for (const auto& peer : peers_) {
    if (peer == nullptr) {
      fds->insert(fds->end(), 2, {-1, 0, 0});
      continue;
    }
    const auto events = [](bool sends) -> short {
      return sends ? POLLIN | POLLOUT : POLLIN;
    };
    fds->push_back(
        {peer->asking.fd(), events(peer->asking.wants_to_send()), 0});
    fds->push_back(
        {peer->serving.fd(), events(peer->serving.wants_to_send()), 0});
  }
}

void TcpShardServer::Turn(int peer, short asking, short serving) {
  Peer& p = *peers_[peer];
  bool good = (asking & POLLOUT) == 0 || p.asking.Send();
  if (good && (asking & ~POLLOUT) != 0) good = p.asking.Receive();
  if (!good) CloseAsking(peer);

  good = (serving & POLLOUT) == 0 || p.serving.Send();
  std::vector<ShardRequest> requests;
  if (good && (serving & ~POLLOUT) != 0) good = p.serving.Receive(&requests);
  for (const ShardRequest& request : requests) {
    if (good) Serve(peer, request);
    good = good && p.num_early + p.serving.num_unsent() <= kMaxRequests;
  }
  if (!good) CloseServing(peer);
}

void TcpShardServer::CloseServing(int peer) {
  peers_[peer]->serving.Close();
  peers_[peer]->num_early = 0;
  early_.erase(
      std::remove_if(early_.begin(), early_.end(),
                     [peer](const Early& early) { return early.peer == peer; }),
      early_.end());
  DropPosts();
  if (!AnyMayAsk()) EndRetirement();
}

void TcpShardServer::DropPosts() {
  std::vector<std::map<int64_t, Offered>> dropped;  // freed without the lock
  absl::MutexLock lock(&mutex_);
  for (int r = 0; r < world_size_; ++r) {
    if (r != rank_ && peers_[r]->serving.fd() < 0) {
      dropped.push_back(std::exchange(posts_[r], {}));
    }
  }
}

bool TcpShardServer::TakeNews() {
  std::vector<ShardRequest> asks;
  std::vector<std::pair<int, ShardRequest>> each;  // whom to ask for what
  bool changed = false, retires = false;
  absl::Status verdict;
  {
    absl::MutexLock lock(&mutex_);
    if (stop_) return false;
    retires = std::exchange(retires_, false);
    asks.swap(asks_);
    changed = std::exchange(changed_, false);
    verdict = std::exchange(verdict_, absl::OkStatus());
    for (const ShardRequest& request : asks) {
      const auto pull = pulls_.find(request.ticket);
      if (pull == pulls_.end()) continue;  // it has failed meanwhile
      for (int r = 0; r < world_size_; ++r) {
        if (pull->second->missing[r]) each.emplace_back(r, request);
      }
    }
  }
  if (!verdict.ok()) Fail(verdict);
  if (retires) StopAsking();
  for (const auto& [r, request] : each) {
    if (r != rank_) peers_[r]->asking.Ask(request);
  }
  for (const auto& [r, request] : each) {
    if (r == rank_) Serve(rank_, request);
  }
  if (changed) {
    DropPosts();
    const std::vector<Early> early = std::exchange(early_, {});
    for (const auto& peer : peers_) {
      if (peer != nullptr) peer->num_early = 0;
    }
    for (const Early& each : early) Serve(each.peer, each.request);
  }
  return true;
}

void TcpShardServer::Serve(int peer, const ShardRequest& request) {
  const absl::StatusOr<Offered> offered =
      request.is_posted() ? TakePosted(peer, request) : Find(request);
  if (offered.ok() && !offered->shard.defined()) {
    early_.push_back({peer, request});
    if (peer != rank_) ++peers_[peer]->num_early;
    return;
  }
  absl::StatusOr<at::Tensor> shard =
      offered.ok() ? ReadShard(*offered)
                   : absl::StatusOr<at::Tensor>(offered.status());
  if (peer == rank_) {
    PullState* const pull = FindPull(request.ticket);
    if (pull == nullptr) return;
    Answered(rank_, request.ticket,
             shard.ok() ? CopyOwn(*pull, *shard) : shard.status());
    return;
  }
  if (shard.ok()) {
    peers_[peer]->serving.Answer(request.ticket, *std::move(shard));
  } else {
    peers_[peer]->serving.Refuse(request.ticket, shard.status());
  }
}

absl::StatusOr<at::Tensor> TcpShardServer::ReadShard(const Offered& offered) {
  if (offered.shard.is_cpu()) return offered.shard;
  return CatchTorch("shard", [&] {
    const OnCommStream scope(offered.shard.device(), offered.written);
    at::Tensor host = offered.shard.cpu();
    absl::MutexLock lock(&mutex_);
    read_ = scope.Now();
    if (offered.is_posted) KeepForCurrentStream(offered.shard);
    return host;
  });
}

TcpShardServer::PullState* TcpShardServer::FindPull(int64_t ticket) {
  absl::MutexLock lock(&mutex_);
  const auto pull = pulls_.find(ticket);
  return pull == pulls_.end() ? nullptr : pull->second.get();
}

char* TcpShardServer::PlaceFor(int peer, const ShardAnswer& answer) {
  PullState* const pull = FindPull(answer.ticket);
  if (pull == nullptr) return nullptr;  // it has failed meanwhile
  if (!pull->missing[peer]) {
    Fail(absl::InternalError(absl::StrCat(NameOf(pull->record), ": rank ",
                                          group_.options.first_rank(peer),
                                          " answered twice")));
    return nullptr;
  }
  if (answer.bytes != pull->request.bytes) {
    Fail(absl::InternalError(
        absl::StrCat(NameOf(pull->record), ": ", answer.bytes,
                     " bytes came, expected ", pull->request.bytes)));
    return nullptr;
  }
  const absl::Duration now = MonotonicNow();
  group_.costs->AddWait(peer, now - std::max(pull->record.entered, charged_));
  charged_ = now;
  return static_cast<char*>(pull->host.mutable_data_ptr()) +
         pull->offset_of(peer);
}

void TcpShardServer::Answered(int peer, int64_t ticket,
                              const absl::Status& error) {
  PullPtr done;
  std::string name;
  {
    absl::MutexLock lock(&mutex_);
    const auto found = pulls_.find(ticket);
    if (found == pulls_.end()) return;
    PullState& pull = *found->second;
    if (error.ok()) {
      pull.missing[peer] = false;
      if (--pull.num_missing > 0) return;
      done = std::move(found->second);
      pulls_.erase(found);
    } else {
      name = NameOf(pull.record);
    }
  }
  if (!error.ok()) return Fail(Annotate(error, name));
  CommThread::End end;
  if (!done->host.is_same(done->whole)) {
    end.status = CatchTorch(done->record.what, [&] {
      const OnCommStream scope(done->whole.device(), done->allocated);
      done->whole.copy_(done->host, /*non_blocking=*/true);
      end.result = scope.Now();
    });
    end.held = std::make_shared<std::pair<at::Tensor, at::Tensor>>(done->whole,
                                                                   done->host);
    end.caller = done->caller;
  }
  const absl::Status copied = end.status;
  End(std::move(done), std::move(end));
  if (!copied.ok()) Fail(copied);
}

void TcpShardServer::CloseAsking(int peer) {
  peers_[peer]->asking.Close();
  absl::MutexLock lock(&mutex_);
  closed_[peer] = MonotonicNow();
}

// The others see that this rank will ask no more.
void TcpShardServer::StopAsking() {
  EndAll(absl::CancelledError("the shard server was retired"));
  for (const auto& peer : peers_) {
    if (peer != nullptr) peer->asking.Close();
  }
  if (!AnyMayAsk()) EndRetirement();
}

bool TcpShardServer::AnyMayAsk() const {
  return std::any_of(peers_.begin(), peers_.end(), [](const auto& peer) {
    return peer != nullptr && peer->serving.fd() >= 0;
  });
}

void TcpShardServer::EndRetirement() {
  std::shared_ptr<CommFuture::State> retirement;
  {
    absl::MutexLock lock(&mutex_);
    retirement.swap(retirement_);
  }
  if (retirement != nullptr) EndFuture(*retirement, absl::OkStatus());
}

void TcpShardServer::End(PullPtr pull, CommThread::End end) {
  CollectiveRecord& record = pull->record;
  record.status = end.status;
  record.left = MonotonicNow();
  group_.records->Leave(record.ticket, end.status);
  group_.costs->Add(record);
  const std::shared_ptr<CommFuture::State> future = std::move(pull->future);
  pull = nullptr;  // frees the tensors before anybody is told
  EndFuture(*future, std::move(end));
}

void TcpShardServer::EndAll(const absl::Status& status) {
  std::map<int64_t, PullPtr> pulls;
  {
    absl::MutexLock lock(&mutex_);
    pulls.swap(pulls_);
  }
  for (const auto& peer : peers_) {
    if (peer != nullptr) peer->asking.DropPlace();
  }
  for (auto& [ticket, pull] : pulls) End(std::move(pull), status);
}

void TcpShardServer::Fail(const absl::Status& status) {
  group_.domain->failure()->Set(status);
  const absl::Status first = group_.domain->failure()->Get();
  group_.domain->announcements().PostFailure(first);
  EndAll(first);
}

// ---- on tessera-watch ----

void TcpShardServer::Look() {
  if (!group_.domain->failure()->Get().ok()) EndRetirement();
  std::vector<std::optional<AwaitedShard>> awaited(world_size_);
  {
    absl::MutexLock lock(&mutex_);
    int left = world_size_;
    for (const auto& [ticket, pull] : pulls_) {
      for (int r = 0; r < world_size_ && left > 0; ++r) {
        if (!pull->missing[r] || awaited[r].has_value()) continue;
        awaited[r] = {NameOf(pull->record), pull->request.key,
                      pull->request.version, pull->record.entered, closed_[r]};
        --left;
      }
    }
  }
  const absl::Status verdict = watch_.Judge(awaited);
  if (verdict.ok()) return;
  {
    absl::MutexLock lock(&mutex_);
    if (pulls_.empty()) return;  // they have ended meanwhile
    verdict_ = verdict;
  }
  Wake();
}

}  // namespace tessera
