#include "comm/rendezvous/store_server.h"

#include <errno.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "base/system/close_on_fork.h"
#include "base/system/system_limits.h"
#include "base/thread/start_thread.h"
#include "comm/connect/sockets.h"

namespace tessera {
namespace {

constexpr size_t kReadBytes = 64 << 10;

absl::Status CannotListen(int error, bool loopback) {
  const std::string why = std::strerror(error);
  const std::string limit = DescriptorLimit(error);
  if (error == EADDRINUSE) return absl::AlreadyExistsError(why);
  if (!limit.empty()) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "no descriptor for the store where ranks meet: ", why, limit));
  }
  // A port below 1024 may be forbidden.
  if (loopback && error != EACCES) {
    return absl::UnavailableError(NoLoopback(why));
  }
  return absl::UnavailableError(why);
}

}  // namespace

absl::StatusOr<std::unique_ptr<StoreServer>> StoreServer::Start(
    const Options& options) {
  auto server = std::unique_ptr<StoreServer>(new StoreServer);
  server->port_ = options.port;
  const int ranks = std::max(options.world_size, 1);
  server->listen_fd_ =
      OpenListener(options.loopback, 2 * ranks, &server->port_);
  if (server->listen_fd_ < 0) return CannotListen(errno, options.loopback);
  server->stop_fd_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  if (server->stop_fd_ < 0) return CannotListen(errno, /*loopback=*/false);
  Reception::Options reception;
  reception.key = options.key;
  // Not only those of the right world: a rank that believes in another size is
  // told so.
  reception.world_size = std::numeric_limits<int>::max();
  reception.at_once = 2 * ranks;
  server->reception_ =
      std::make_unique<Reception>(server->listen_fd_, std::move(reception));
  TESSERA_ASSIGN_OR_RETURN(
      server->thread_,
      StartThread("tessera-host", [s = server.get()] { s->Run(); }));
  return server;
}

StoreServer::~StoreServer() {
  if (thread_.joinable()) {
    eventfd_write(stop_fd_, 1);
    thread_.join();
  }
  for (const auto& [id, client] : clients_) CloseDescriptor(client.fd);
  reception_ = nullptr;
  if (stop_fd_ >= 0) close(stop_fd_);
  if (listen_fd_ >= 0) CloseDescriptor(listen_fd_);
}

void StoreServer::Run() {
  std::vector<pollfd> fds;
  std::vector<StoreTable::Client> ids;
  while (true) {
    fds = {{stop_fd_, POLLIN, 0}};
    ids.clear();
    for (const auto& [id, client] : clients_) {
      const bool full = !client.out.empty();
      fds.push_back(
          {client.fd, static_cast<short>(full ? POLLOUT : POLLIN), 0});
      ids.push_back(id);
    }
    const size_t others = fds.size();
    reception_->AddTo(&fds);
    if (poll(fds.data(), fds.size(), reception_->timeout_ms()) < 0) continue;
    if (fds[0].revents != 0) return;
    for (size_t i = 0; i < ids.size(); ++i) {
      const auto it = clients_.find(ids[i]);
      // An answer to another one may have closed it.
      if (fds[i + 1].revents == 0 || it == clients_.end()) continue;
      const bool good = fds[i + 1].events == POLLOUT
                            ? Write(&it->second)
                            : Read(ids[i], &it->second);
      if (!good) Close(ids[i]);
    }
    for (const Guest& guest : reception_->Look(&fds[others])) {
      clients_[++ids_].fd = guest.fd;
    }
  }
}

void StoreServer::Close(StoreTable::Client id) {
  const auto it = clients_.find(id);
  if (it == clients_.end()) return;
  CloseDescriptor(it->second.fd);
  clients_.erase(it);
  table_.Forget(id);
}

bool StoreServer::Read(StoreTable::Client id, Client* client) {
  if (!ReceiveSome(client->fd, &client->in, kReadBytes)) return false;
  StoreMessage request;
  while (true) {
    const Decoded decoded = TakeFrame(&client->in, &request);
    if (decoded == Decoded::kNonsense) return false;
    if (decoded == Decoded::kIncomplete) return true;
    for (const auto& [to, answer] : table_.Handle(id, std::move(request))) {
      const auto it = clients_.find(to);
      if (it == clients_.end()) continue;
      it->second.out += EncodeFrame(answer);
      // `client` is closed by who called this.
      if (!Write(&it->second) && to != id) Close(to);
    }
  }
}

bool StoreServer::Write(Client* client) {
  return SendSome(client->fd, &client->out);
}

}  // namespace tessera
