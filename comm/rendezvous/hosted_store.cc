#include "comm/rendezvous/hosted_store.h"

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "base/status.h"
#include "base/thread/deadline.h"
#include "base/torch_guard.h"
#include "comm/connect/job_secret.h"
#include "comm/rendezvous/rendezvous.h"
#include "comm/rendezvous/start_watch.h"
#include "comm/rendezvous/store_client.h"
#include "comm/rendezvous/store_server.h"
#include "torch/csrc/distributed/c10d/PrefixStore.hpp"

namespace tessera {
namespace {

// This process's way to the store that it hosts itself.
constexpr absl::Duration kOwnStore = absl::Seconds(30);

}  // namespace

absl::StatusOr<HostedStore> HostedStore::Start(int world_size) {
  HostedStore result;
  result.secret_ = NewJobSecret();
  StoreServer::Options server;
  server.loopback = true;
  server.world_size = world_size;
  server.key = KeyOfSecret(result.secret_, kStorePurpose, kStorePrefix);
  StoreClientOptions client;
  client.host = "127.0.0.1";
  client.key = server.key;
  TESSERA_ASSIGN_OR_RETURN(client.server, StoreServer::Start(server));
  client.port = client.server->port();
  TESSERA_ASSIGN_OR_RETURN(c10::intrusive_ptr<c10d::Store> store,
                           ConnectStore(client, Deadline::After(kOwnStore)));
  result.port_ = client.port;
  result.store_ =
      c10::make_intrusive<c10d::PrefixStore>(kStorePrefix, std::move(store));
  return result;
}

std::vector<std::pair<std::string, std::string>> HostedStore::Environment()
    const {
  return {
      {"MASTER_ADDR", "127.0.0.1"},
      {"MASTER_PORT", absl::StrCat(port_)},
      {kJobSecretVariable, secret_},
      {kJobSecretFileVariable, ""},  // what is there is not this job's
  };
}

void HostedStore::Fail(const std::string& message) {
  PutFailure(*store_, absl::UnavailableError(message), /*hosts_store=*/false);
}

bool HostedStore::HasCome(int rank) const {
  absl::StatusOr<bool> has_come = CatchTorch(
      "store", [&]() -> bool { return store_->check({CameKey(rank)}); });
  return has_come.ok() && *has_come;
}

}  // namespace tessera
