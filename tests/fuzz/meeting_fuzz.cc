// Fuzzes how ranks meet: the listening side of a handshake
// (comm/connect/handshake.h), the places where others listen, the store's
// messages (store_messages.h, store_table.h), and the frames of liveness.
#include <algorithm>
#include <string>
#include <vector>

#include "base/check.h"
#include "comm/connect/handshake.h"
#include "comm/rendezvous/rank_info.h"
#include "comm/rendezvous/store_messages.h"
#include "comm/rendezvous/store_table.h"
#include "comm/watch/liveness_frames.h"
#include "tests/fuzz/targets.h"

namespace tessera {
namespace {

// Nobody is let in who does not know the key, whatever he says.
void ListenTo(absl::string_view input) {
  const std::string key = "the key of this job";
  Greeting greeting(key, /*own=*/0, /*world_size=*/4);
  while (!input.empty()) {
    // Pieces whose lengths the input decides.
    const size_t piece =
        std::min({input.size(), greeting.wanted(),
                  size_t{1} + static_cast<unsigned char>(input.front()) % 64});
    std::string answer;
    const bool goes_on = greeting.Take(input.substr(0, piece), &answer);
    TESSERA_CHECK(answer.size() <= 48);
    TESSERA_CHECK(!greeting.proven());
    if (!goes_on) return;
    input.remove_prefix(piece);
  }
  TESSERA_CHECK(greeting.wanted() > 0 && greeting.wanted() <= 32);
}

std::string Hello(int32_t rank) {
  return "tessera2" + std::string(16, 'n') + BytesOf(rank);
}

void ReadEndpoint(absl::string_view input) {
  const Endpoint endpoint = ParseEndpoint(std::string(input), "here");
  TESSERA_CHECK(endpoint.addresses.size() <= input.size() + 1);
  (void)RankInfo::Decode(input);
}

// Frames of three clients, the first byte of each message's first field being
// as good as any to say whose it is.
void AskStore(absl::string_view input) {
  std::string in(input);
  StoreTable table;
  StoreMessage request;
  size_t asked = 0, answered = 0;
  while (TakeFrame(&in, &request) == Decoded::kMessage) {
    const std::string frame = EncodeFrame(request);
    std::string again = frame;
    StoreMessage same;
    TESSERA_CHECK(TakeFrame(&again, &same) == Decoded::kMessage);
    TESSERA_CHECK(same == request && again.empty());
    ++asked;
    const int64_t client =
        request[0].empty() ? 0 : static_cast<unsigned char>(request[0][0]) % 3;
    for (const auto& [to, answer] : table.Handle(client, request)) {
      ++answered;
      TESSERA_CHECK(answer.at(0) == "ok" || answer.at(0) == "error");
      TESSERA_CHECK(to >= 0 && to < 3);
    }
  }
  TESSERA_CHECK(answered <= asked);
  for (int client = 0; client < 3; ++client) table.Forget(client);
}

std::string Frames(const std::vector<StoreMessage>& messages) {
  std::string frames;
  for (const StoreMessage& message : messages) frames += EncodeFrame(message);
  return frames;
}

void ReadLiveness(absl::string_view input) {
  std::string in(input);
  LivenessFrame frame;
  while (in.size() >= LivenessFrame::kBytes) {
    const std::string bytes = in.substr(0, LivenessFrame::kBytes);
    const bool good = frame.Take(&in, /*world_size=*/4);
    TESSERA_CHECK(frame.Encode() == bytes);
    if (!good) return;
    TESSERA_CHECK(frame.kind == 'p' || (frame.rank >= 0 && frame.rank < 4));
  }
}

}  // namespace

FuzzTarget HandshakeTarget() {
  return {"handshake",
          ListenTo,
          {Hello(1), Hello(3) + std::string(32, 'p') + "k", Hello(-1)}};
}

FuzzTarget EndpointTarget() {
  return {"endpoint",
          ReadEndpoint,
          {"0123456789abcdef0123456789abcdef 4711 here 10.0.0.7 fd00::1",
           RankInfo().Encode()}};
}

FuzzTarget StoreTarget() {
  return {"store",
          AskStore,
          {Frames({{"set", "a", "1"}, {"get", "a", "b"}, {"append", "b", "x"}}),
           Frames({{"add", "n", "5"}, {"wait", "n"}, {"check", "n", "m"}}),
           Frames({{"swap", "k", "", "v"}, {"delete", "k"}, {"count"}})}};
}

FuzzTarget LivenessTarget() {
  return {"liveness",
          ReadLiveness,
          {LivenessFrame{'b', 1}.Encode() + LivenessFrame{'g', 3}.Encode(),
           LivenessFrame{'p', -7}.Encode()}};
}

}  // namespace tessera
