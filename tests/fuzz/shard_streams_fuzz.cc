// Fuzzes shards over a connection (comm/serve/shard_streams.h): answers as the
// asking end reads them, requests as the serving end does.
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "base/check.h"
#include "comm/serve/shard_streams.h"
#include "tests/fuzz/targets.h"

namespace tessera {
namespace {

constexpr int64_t kShardBytes = 64;
constexpr int kPeer = 1;

// Has a place for the shards of some tickets, once for each.
class Asker : public AskingEnd::Receiver {
 public:
  char* PlaceFor(int peer, const ShardAnswer& answer) override {
    TESSERA_CHECK_EQ(peer, kPeer);
    if (answer.bytes != kShardBytes || answer.ticket % 2 == 0) return nullptr;
    shard_.assign(kShardBytes, 0);
    return shard_.data();
  }
  void Answered(int peer, int64_t ticket, const absl::Status& error) override {
    TESSERA_CHECK_EQ(peer, kPeer);
    ++answers_;
    // A refusal is one of the errors that there are, in the peer's words.
    if (error.ok()) return;
    TESSERA_CHECK(error.raw_code() > 0 && error.raw_code() <= 16)
        << error.raw_code();
  }

 private:
  std::string shard_;
  int answers_ = 0;
};

void ReadAnswers(absl::string_view input) {
  Asker asker;
  std::unique_ptr<AskingEnd> end;
  FeedSocket(
      input,
      [&](int fd) { end = std::make_unique<AskingEnd>(fd, kPeer, &asker); },
      [&] { return end->Receive(); });
}

void ReadRequests(absl::string_view input) {
  std::unique_ptr<ServingEnd> end;
  std::vector<ShardRequest> requests;
  FeedSocket(
      input, [&](int fd) { end = std::make_unique<ServingEnd>(fd); },
      [&] { return end->Receive(&requests); });
  TESSERA_CHECK_LE(requests.size() * sizeof(ShardRequest), input.size());
  for (size_t i = 0; i < requests.size(); ++i) {
    TESSERA_CHECK(std::memcmp(&requests[i],
                              input.data() + i * sizeof(ShardRequest),
                              sizeof(ShardRequest)) == 0);
  }
}

std::string Answer(int64_t ticket, int64_t code, const std::string& payload) {
  return BytesOf(
             ShardAnswer{ticket, code, static_cast<int64_t>(payload.size())}) +
         payload;
}

}  // namespace

FuzzTarget ShardAnswersTarget() {
  const std::string shard(kShardBytes, 's');
  const std::string good = Answer(1, 0, shard);
  const std::string refused = Answer(2, 13, "rank 1 is at version 7");
  const std::string unasked = Answer(4, 0, std::string(100, 'u'));
  return {"shard_answers",
          ReadAnswers,
          {good, refused, good + refused + good, unasked + good,
           Answer(3, 0, ""), Answer(3, 5, "")}};
}

FuzzTarget ShardRequestsTarget() {
  const std::string one = BytesOf(ShardRequest{1, 2, 3, kShardBytes});
  return {"shard_requests",
          ReadRequests,
          {one, one + one, one + BytesOf(ShardRequest{2, -1, -1, -1}) + one}};
}

}  // namespace tessera
