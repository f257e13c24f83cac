// Why a request that comes too early is kept and not refused: ranks come to a
// version at different times, and who asks first is not wrong. One that comes
// too late is an error: the values it asks for are gone, and any others would
// be computed with as if they were the right ones.
//
// Why the own shard is copied by the caller: it is there already, so a rank
// whose io thread is busy with others does not wait for itself. Not on a
// device, where the caller would wait for its stream.
//
// Why a second take of a key is refused while one is under way: which of the
// two the next message is for would depend on when it comes.
#include "comm/serve/tcp_shard_server.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "ATen/ops/empty.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "base/check.h"
#include "base/monotonic.h"
#include "base/status.h"
#include "base/thread/start_thread.h"
#include "base/torch_guard.h"
#include "c10/core/impl/VirtualGuardImpl.h"
#include "comm/group/group_communicator.h"
#include "comm/watch/watchdog.h"

namespace tessera {
namespace {

absl::Status CheckPull(int64_t version, const at::Tensor& whole,
                       int world_size) {
  if (version < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("version is ", version, ", expected 0 or more"));
  }
  if (!whole.defined() || !whole.is_contiguous()) {
    return absl::InvalidArgumentError("whole is undefined or not contiguous");
  }
  if (whole.numel() % world_size != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("whole has ", whole.numel(),
                     " elements, expected a multiple of ", world_size));
  }
  return absl::OkStatus();
}

absl::Status CheckTake(int from, const at::Tensor& message, int world_size) {
  if (from < 0 || from >= world_size) {
    return absl::InvalidArgumentError(
        absl::StrCat("rank ", from, " of ", world_size, " does not exist"));
  }
  if (!message.defined() || !message.is_contiguous()) {
    return absl::InvalidArgumentError("message is undefined or not contiguous");
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::unique_ptr<ShardServer>> MakeTcpShardServer(
    GroupCommunicator* group, const CommTag& tag) {
  const GroupOptions& options = group->options();
  const std::shared_ptr<FailureDomain>& domain = group->domain();
  std::vector<int> ranks;  // as the domain calls them
  for (int r = 0; r < options.world_size; ++r) {
    ranks.push_back(options.first_rank(r));
  }
  ShardMeshOptions mesh_options;
  // Before the ranks that are done give up waiting for this one.
  mesh_options.timeout =
      std::min(options.connect_timeout, options.collective_timeout / 2);
  mesh_options.trouble = [&] { return domain->TroubleOf(ranks); };
  TESSERA_ASSIGN_OR_RETURN(std::unique_ptr<ShardMesh> mesh,
                           ConnectShardMesh(*group, mesh_options, tag));
  absl::StatusOr<std::unique_ptr<ShardServer>> server =
      TcpShardServer::Create({options, domain, group->records(), group->costs(),
                              group->shared_from_this()},
                             std::move(mesh));
  TESSERA_RETURN_IF_ERROR(group->AgreeOk(server.status(), tag.what, tag.site));
  return server;
}

absl::StatusOr<std::unique_ptr<ShardServer>> TcpShardServer::Create(
    ServedGroup group, std::unique_ptr<ShardMesh> mesh) {
  const int wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  if (wake_fd < 0) {
    return absl::ResourceExhaustedError("no descriptor for a shard server");
  }
  std::unique_ptr<TcpShardServer> server(
      new TcpShardServer(std::move(group), mesh.get(), wake_fd));
  TESSERA_RETURN_IF_ERROR(server->Start());
  return std::unique_ptr<ShardServer>(std::move(server));
}

TcpShardServer::TcpShardServer(ServedGroup group, ShardMesh* mesh, int wake_fd)
    : group_(std::move(group)),
      rank_(group_.options.rank),
      world_size_(group_.options.world_size),
      wake_fd_(wake_fd),
      peers_(world_size_),
      watch_(group_.options, group_.domain),
      posts_(world_size_),
      closed_(world_size_) {
  AskingEnd::Receiver* const receiver = this;
  for (int r = 0; r < world_size_; ++r) {
    if (r == rank_) continue;
    peers_[r] =
        std::make_unique<Peer>(std::exchange(mesh->ask[r], -1),
                               std::exchange(mesh->serve[r], -1), r, receiver);
  }
}

absl::Status TcpShardServer::Start() {
  TESSERA_ASSIGN_OR_RETURN(thread_,
                           StartThread("tessera-shards", [this] { Run(); }));
  TESSERA_ASSIGN_OR_RETURN(
      look_, Watchdog::Get().Add(watch_.tick(), [this] { Look(); }));
  return absl::OkStatus();
}

TcpShardServer::~TcpShardServer() {
  if (look_ != 0) Watchdog::Get().Remove(look_);
  {
    absl::MutexLock lock(&mutex_);
    stop_ = true;
  }
  Wake();
  if (thread_.joinable()) thread_.join();
  OrderAfterReads();  // what was offered may be freed
  close(wake_fd_);
}

void TcpShardServer::Wake() const { eventfd_write(wake_fd_, 1); }

void TcpShardServer::Offer(int64_t key, at::Tensor shard) {
  TESSERA_CHECK(shard.defined() && shard.is_contiguous())
      << "shard " << key << " is undefined or not contiguous";
  const StreamPoint written = StreamPoint::Now(shard.device());
  {
    absl::MutexLock lock(&mutex_);
    offers_[key] = {std::move(shard), written};
    changed_ = true;
  }
  Wake();
}

void TcpShardServer::SetVersion(int64_t version) {
  {
    absl::MutexLock lock(&mutex_);
    TESSERA_CHECK(version >= version_)
        << "version " << version << " after " << version_;
    for (auto& [key, offered] : offers_) {
      offered.written.Order();  // by the stream of its Offer
      offered.written = StreamPoint::Now(offered.shard.device());
    }
    version_ = version;
    changed_ = true;
  }
  Wake();
}

void TcpShardServer::Post(int to, int64_t key, at::Tensor message) {
  TESSERA_CHECK(to >= 0 && to < world_size_)
      << "rank " << to << " of " << world_size_;
  TESSERA_CHECK(message.defined() && message.is_contiguous())
      << "message " << key << " is undefined or not contiguous";
  const StreamPoint written = StreamPoint::Now(message.device());
  {
    absl::MutexLock lock(&mutex_);
    const bool is_new =
        posts_[to]
            .try_emplace(key, Offered{std::move(message), written, true})
            .second;
    TESSERA_CHECK(is_new) << "message " << key << " to rank "
                          << group_.options.first_rank(to)
                          << " was posted before, and is not taken yet";
    changed_ = true;
  }
  Wake();
}

void TcpShardServer::OrderAfterReads() {
  absl::MutexLock lock(&mutex_);
  // A device that has failed says so elsewhere.
  (void)CatchTorch("shards", [read = read_] { read.Order(); });
}

absl::StatusOr<TcpShardServer::Offered> TcpShardServer::Find(
    const ShardRequest& request) {
  absl::MutexLock lock(&mutex_);
  const int own = group_.options.first_rank(rank_);
  if (version_ > request.version) {
    return absl::InternalError(absl::StrCat(
        "rank ", own, " is at version ", version_, " of shard ", request.key,
        ", and was asked for version ", request.version));
  }
  const auto offer = offers_.find(request.key);
  if (version_ < request.version || offer == offers_.end()) {
    return Offered();
  }
  const auto bytes = static_cast<int64_t>(offer->second.shard.nbytes());
  if (bytes != request.bytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("shard ", request.key, " of rank ", own, " has ", bytes,
                     " bytes, and was expected to have ", request.bytes));
  }
  return offer->second;
}

absl::StatusOr<TcpShardServer::Offered> TcpShardServer::TakePosted(
    int peer, const ShardRequest& request) {
  absl::MutexLock lock(&mutex_);
  const auto post = posts_[peer].find(request.key);
  if (post == posts_[peer].end()) return Offered();
  const auto bytes = static_cast<int64_t>(post->second.shard.nbytes());
  if (bytes != request.bytes) {
    return absl::InvalidArgumentError(absl::StrCat(
        "message ", request.key, " of rank ", group_.options.first_rank(rank_),
        " has ", bytes, " bytes, and was expected to have ", request.bytes));
  }
  Offered taken = std::move(post->second);
  posts_[peer].erase(post);
  return taken;
}

absl::StatusOr<TcpShardServer::PullPtr> TcpShardServer::MakePull(
    const ShardRequest& request, const at::Tensor& whole, std::vector<bool> of,
    const CommTag& tag) const {
  auto pull = std::make_unique<PullState>();
  pull->request = request;
  pull->whole = pull->host = whole;
  if (!whole.is_cpu()) {
    // Pinned: the copy to `whole` waits for what its stream has been given
    // before the pull, and nobody waits for that copy here.
    TESSERA_RETURN_IF_ERROR(CatchTorch(tag.what, [&] {
      pull->host = at::empty(
          whole.sizes(), whole.options().device(at::kCPU).pinned_memory(true));
      pull->allocated = StreamPoint::Now(whole.device());
      pull->caller = c10::impl::VirtualGuardImpl(whole.device().type())
                         .getStream(whole.device());
    }));
  }
  pull->missing = std::move(of);
  pull->num_missing = static_cast<int>(
      std::count(pull->missing.begin(), pull->missing.end(), true));
  pull->future = std::make_shared<CommFuture::State>();
  CollectiveRecord& record = pull->record;
  record = RecordOf(CollectiveOp::kPull, whole);
  record.what = tag.what.empty() ? "pull" : tag.what;
  record.group = group_.options.name;
  record.bytes =
      (pull->num_missing - (pull->missing[rank_] ? 1 : 0)) * request.bytes;
  record.site = tag.site;
  pull->future->purpose = {
      request.is_posted() ? tag.reason : WaitReason::kGather, record.what};
  record.enqueued = record.entered = MonotonicNow();
  return pull;
}

absl::Status TcpShardServer::CopyOwn(PullState& pull,
                                     const at::Tensor& host) const {
  return CatchTorch("own shard", [&] {
    const char* const from = static_cast<const char*>(host.const_data_ptr());
    char* const to = static_cast<char*>(pull.host.mutable_data_ptr()) +
                     pull.offset_of(rank_);
    if (from != to && pull.request.bytes > 0) {
      memcpy(to, from, pull.request.bytes);
    }
  });
}

CommFuture TcpShardServer::Pull(int64_t key, int64_t version, at::Tensor whole,
                                CommTag tag) {
  absl::Status status = CheckPull(version, whole, world_size_);
  if (!status.ok()) return DoneFuture(Annotate(status, tag.what));
  status = group_.domain->failure()->Get();
  if (!status.ok()) return DoneFuture(std::move(status));
  ShardRequest request;
  request.key = key;
  request.version = version;
  request.bytes = static_cast<int64_t>(whole.nbytes()) / world_size_;
  absl::StatusOr<PullPtr> made =
      MakePull(request, whole, std::vector<bool>(world_size_, true), tag);
  if (!made.ok()) return DoneFuture(made.status());
  PullPtr pull = *std::move(made);
  // Here, so that it keeps nobody waiting; if it cannot be, over there.
  const absl::StatusOr<Offered> own = Find(request);
  if (own.ok() && own->shard.defined() && own->shard.is_cpu() &&
      CopyOwn(*pull, own->shard).ok()) {
    pull->missing[rank_] = false;
    --pull->num_missing;
  }
  return Begin(std::move(pull));
}

CommFuture TcpShardServer::Take(int from, int64_t key, at::Tensor message,
                                CommTag tag) {
  absl::Status status = CheckTake(from, message, world_size_);
  if (!status.ok()) return DoneFuture(Annotate(status, tag.what));
  status = group_.domain->failure()->Get();
  if (!status.ok()) return DoneFuture(std::move(status));
  ShardRequest request;
  request.key = key;
  request.version = ShardRequest::kPosted;
  request.bytes = static_cast<int64_t>(message.nbytes());
  std::vector<bool> of(world_size_);
  of[from] = true;
  absl::StatusOr<PullPtr> made = MakePull(request, message, std::move(of), tag);
  if (!made.ok()) return DoneFuture(made.status());
  return Begin(*std::move(made));
}

bool TcpShardServer::IsTaken(const PullState& take) const {
  return std::any_of(pulls_.begin(), pulls_.end(), [&](const auto& each) {
    const PullState& other = *each.second;
    return other.request.is_posted() && other.request.key == take.request.key &&
           other.missing == take.missing;
  });
}

CommFuture TcpShardServer::Begin(PullPtr pull) {
  CommFuture future(pull->future);
  {
    absl::MutexLock lock(&mutex_);
    if (retired_) return DoneFuture(absl::CancelledError("retired"));
    if (pull->request.is_posted() && IsTaken(*pull)) {
      return DoneFuture(Annotate(
          absl::InvalidArgumentError(absl::StrCat("message ", pull->request.key,
                                                  " is being taken already")),
          pull->record.what));
    }
    pull->request.ticket = pull->record.sequence = ++tickets_;
    pull->record.ticket = group_.records->Enqueue(pull->record);
    asks_.push_back(pull->request);
    pulls_.emplace(tickets_, std::move(pull));
  }
  Wake();
  return future;
}

CommFuture TcpShardServer::Retire() {
  auto future = std::make_shared<CommFuture::State>();
  {
    absl::MutexLock lock(&mutex_);
    retirement_ = future;
    retires_ = retired_ = true;
  }
  Wake();
  return CommFuture(std::move(future));
}

}  // namespace tessera
