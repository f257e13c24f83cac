#include "comm/gloo/gloo_links.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "base/env.h"
#include "base/log.h"
#include "base/sigpipe.h"
#include "base/status.h"
#include "base/torch_guard.h"
#include "comm/connect/keyed_hash.h"
#include "comm/connect/sockets.h"
#include "comm/gloo/gloo_interface.h"
#include "comm/gloo/gloo_peers.h"

// The only file that sees c10d's Gloo header. It never makes a GlooStore.
#include "torch/csrc/distributed/c10d/ProcessGroupGloo.hpp"

namespace tessera {
namespace {

// Waits are ended by our own monitor; Gloo's timeout must never come first.
constexpr std::chrono::milliseconds kNever = std::chrono::hours(24 * 365);

constexpr char kTokenKey[] = "token";

// "call: [/pytorch/.../pair.cc:547] Connection closed by peer [10.0.0.1]:41"
// without the place in the source.
std::string GlooWords(absl::string_view message) {
  const size_t bracket = message.find("[/");
  if (bracket != absl::string_view::npos) {
    const size_t end = message.find("] ", bracket);
    if (end != absl::string_view::npos) message.remove_prefix(end + 2);
  }
  return std::string(message);
}

std::shared_ptr<gloo::transport::Device> MakeDevice(
    const GlooTransportOptions& options) {
  using Group = c10d::ProcessGroupGloo;
  const bool lazy = false;
  if (options.same_host)
    return Group::createDeviceForHostname("127.0.0.1", lazy);
  if (const auto name = EnvString("GLOO_SOCKET_IFNAME")) {
    return Group::createDeviceForInterface(*name, lazy);
  }
  if (options.address.empty()) return Group::createDefaultDevice(lazy);
  return Group::createDeviceForHostname(options.address, lazy);
}

}  // namespace

struct GlooLinks::Message {
  int peer = 0;
  at::Tensor tensor;
  c10::intrusive_ptr<c10d::Work> work;  // null if it could not be started
  absl::Status start;
};

GlooLinks::GlooLinks() = default;
GlooLinks::~GlooLinks() = default;

// Why nobody is let in later: Gloo goes on accepting, keeps each connection,
// and ends the process when there are no descriptors left.
absl::StatusOr<std::shared_ptr<GlooLinks>> GlooLinks::Connect(
    const c10::intrusive_ptr<c10d::Store>& store,
    const GlooTransportOptions& options) {
  using Group = c10d::ProcessGroupGloo;
  const auto interface = EnvString("GLOO_SOCKET_IFNAME");
  if (!options.same_host && interface.has_value()) {
    TESSERA_RETURN_IF_ERROR(
        Annotate(CheckGlooInterface(*interface, InterfacesHere()),
                 absl::StrCat("rank ", options.first_rank(options.rank))));
  }
  auto transport = std::shared_ptr<GlooLinks>(new GlooLinks);
  std::string token;
  TESSERA_RETURN_IF_ERROR(
      CatchTorch("gloo", [&] {
        // Its own client: Gloo may block in the store, announcements must not.
        c10::intrusive_ptr<c10d::Store> own = store->clone();
        if (options.rank == 0) own->set(kTokenKey, RandomToken());
        token = own->get_to_str(kTokenKey);
        const SigpipeBlock no_sigpipe;  // for Gloo's threads
        auto group_options = Group::Options::create(
            absl::ToChronoMilliseconds(options.connect_timeout));
        group_options->threads = 1;  // none of its queued collectives are used
        const std::vector<int> listeners = ListenersOf(
            [&] { group_options->devices.push_back(MakeDevice(options)); });
        transport->group_ = c10::make_intrusive<Group>(
            std::move(own), options.rank, options.world_size, group_options);
        transport->group_->setTimeout(kNever);
        transport->names_ = options.first_ranks;
        bool closed = !listeners.empty();
        for (int fd : listeners) closed = TakeNoMore(fd) && closed;
        if (!closed) {
          TESSERA_LOG(WARNING)
              << "gloo still listens: any process that reaches its port can "
                 "use up this process's descriptors";
        }
      }));
  std::shared_ptr<void> memory;
  const absl::Status proved =
      ProvePeers(*transport, options.rank, options.world_size, token, &memory);
  if (proved.ok()) return transport;
  Abandon(transport, std::move(memory));
  return proved;
}

std::shared_ptr<GlooLinks::Message> GlooLinks::Start(
    at::Tensor t, int peer, const std::function<Work(Tensors&)>& start) {
  auto message = std::make_shared<Message>();
  message->peer = peer;
  message->tensor = std::move(t);
  // Gloo throws here if the connection is known to be broken.
  message->start = CatchTorch("gloo", [&] {
    Tensors tensors{message->tensor};
    message->work = start(tensors);
  });
  absl::MutexLock lock(&mutex_);
  if (aborted_ && message->work != nullptr) message->work->abort();
  pending_.push_back(message);
  return message;
}

std::shared_ptr<GlooLinks::Message> GlooLinks::Send(at::Tensor t, int peer,
                                                    uint32_t tag) {
  return Start(std::move(t), peer, [&](Tensors& tensors) {
    return group_->send(tensors, peer, static_cast<int>(tag));
  });
}

std::shared_ptr<GlooLinks::Message> GlooLinks::Receive(at::Tensor t, int peer,
                                                       uint32_t tag) {
  return Start(std::move(t), peer, [&](Tensors& tensors) {
    return group_->recv(tensors, peer, static_cast<int>(tag));
  });
}

absl::Status GlooLinks::Wait(Message& message) {
  bool arrived = false;
  absl::Status status = message.start;
  if (status.ok()) {
    // By itself it would wait as long as connecting may take.
    status = CatchTorch("gloo", [&] { arrived = message.work->wait(kNever); });
  }
  if (!status.ok()) {
    return absl::UnavailableError(absl::StrCat(
        "rank ", NameOf(message.peer),
        " has ended or cannot be reached (gloo: ", GlooWords(status.message()),
        ")"));
  }
  if (!arrived) return absl::CancelledError("the wait was aborted");
  absl::MutexLock lock(&mutex_);
  pending_.erase(
      std::find_if(pending_.begin(), pending_.end(),
                   [&](const auto& m) { return m.get() == &message; }));
  return absl::OkStatus();
}

int GlooLinks::PeerOf(const Message& message) { return message.peer; }

void GlooLinks::Abort() {
  absl::MutexLock lock(&mutex_);
  aborted_ = true;
  for (const auto& message : pending_) {
    if (message->work != nullptr) message->work->abort();
  }
}

void GlooLinks::Abandon(std::shared_ptr<GlooLinks> transport,
                        std::shared_ptr<void> memory) {
  static auto* const kept = new std::vector<
      std::pair<std::shared_ptr<GlooLinks>, std::shared_ptr<void>>>;
  static auto* const mutex = new absl::Mutex;
  absl::MutexLock lock(mutex);
  kept->emplace_back(std::move(transport), std::move(memory));
}

}  // namespace tessera
