// The ranks are threads on one mapping, as in collectives_test.
#include "comm/shm/channels.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <future>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status_matchers.h"
#include "comm/shm/shm_testing.h"

namespace tessera::shm {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

// A message's end, to wait for.
class End {
 public:
  Channels::Done Done() {
    return [this](const absl::Status& status, int peer) {
      ended_.set_value({status, peer});
    };
  }
  absl::Status Wait() { return future_.get().first; }
  bool ended() {
    return future_.wait_for(std::chrono::seconds(0)) ==
           std::future_status::ready;
  }
  int peer() { return future_.get().second; }

 private:
  std::promise<std::pair<absl::Status, int>> ended_;
  std::shared_future<std::pair<absl::Status, int>> future_ =
      ended_.get_future();
};

class ChannelsTest : public testing::Test {
 protected:
  void Make(int size, Channels::Options options = {}) {
    host_ = std::make_unique<Host>(size);
    for (int r = 0; r < size; ++r) {
      channels_.push_back(std::make_unique<Channels>(&host_->team(r), options));
    }
  }
  // All at once: each waits for its thread.
  ~ChannelsTest() override {
    channels_.clear();
    host_.reset();
  }

  std::unique_ptr<Host> host_;
  std::vector<std::unique_ptr<Channels>> channels_;
};

TEST_F(ChannelsTest, AReceiveMayComeBeforeOrAfterItsMessage) {
  Make(2);
  int got = 0, sent = 41;
  for (bool receive_first : {true, false}) {
    ++sent;
    End send, receive;
    if (receive_first) {
      channels_[1]->Receive(0, 7, &got, sizeof(got), receive.Done());
    }
    channels_[0]->Send(1, 7, &sent, sizeof(sent), send.Done());
    TESSERA_EXPECT_OK(send.Wait());
    if (!receive_first) {
      channels_[1]->Receive(0, 7, &got, sizeof(got), receive.Done());
    }
    TESSERA_EXPECT_OK(receive.Wait());
    EXPECT_EQ(got, sent);
    EXPECT_EQ(receive.peer(), 0);
  }
}

TEST_F(ChannelsTest, TagsDoNotMixAndOrderIsKeptWithinOne) {
  Make(2);
  const int sent[] = {10, 11, 20, 12, 21};
  const int tags[] = {1, 1, 2, 1, 2};
  End sends[5];
  for (int i = 0; i < 5; ++i) {
    channels_[0]->Send(1, tags[i], &sent[i], sizeof(int), sends[i].Done());
  }
  for (const auto& [tag, expected] : std::vector<std::pair<int, int>>{
           {2, 20}, {1, 10}, {1, 11}, {2, 21}, {1, 12}}) {
    int got = 0;
    End receive;
    channels_[1]->Receive(0, tag, &got, sizeof(got), receive.Done());
    TESSERA_EXPECT_OK(receive.Wait());
    EXPECT_EQ(got, expected);
  }
}

TEST_F(ChannelsTest, ALongMessageIsThroughWhenItIsRead) {
  Make(2);
  char* const data = host_->heap(0);
  std::memset(data, 5, 1 << 20);
  End send;
  channels_[0]->Send(1, 0, data, 1 << 20, send.Done());
  int other = 3, got_other = 0;
  End send_other, receive_other;
  channels_[0]->Send(1, 1, &other, sizeof(other), send_other.Done());
  channels_[1]->Receive(0, 1, &got_other, sizeof(int), receive_other.Done());
  TESSERA_EXPECT_OK(receive_other.Wait());
  EXPECT_FALSE(send.ended());
  std::string got(1 << 20, '\0');
  End receive;
  channels_[1]->Receive(0, 0, got.data(), 1 << 20, receive.Done());
  TESSERA_EXPECT_OK(receive.Wait());
  TESSERA_EXPECT_OK(send.Wait());
  EXPECT_EQ(got, std::string(1 << 20, 5));
}

TEST_F(ChannelsTest, OneMaySendToOneself) {
  Make(1);
  int sent = 9, got = 0;
  End send, receive;
  channels_[0]->Send(0, 0, &sent, sizeof(sent), send.Done());
  channels_[0]->Receive(0, 0, &got, sizeof(got), receive.Done());
  TESSERA_EXPECT_OK(send.Wait());
  TESSERA_EXPECT_OK(receive.Wait());
  EXPECT_EQ(got, 9);
}

// Every rank sends to every rank many messages of all sizes, and receives in an
// order of its own, some from whom it may.
TEST_F(ChannelsTest, AStormOfMessages) {
  constexpr int kRanks = 3, kMessages = 400;
  Make(kRanks);
  const int64_t sizes[] = {0, 1, 8, 100, kInlineBytes, kInlineBytes + 1, 60000};
  auto size_of = [&](int from, int to, int i) {
    return sizes[(from * 31 + to * 17 + i * 7) % 7];
  };
  auto byte_of = [](int from, int to, int i) {
    return static_cast<char>(from * 50 + to * 20 + i);
  };
  auto rank = [&](int me) {
    std::atomic<int> open{2 * kRanks * kMessages}, failed{0};
    std::promise<void> all;
    auto done = [&](const absl::Status& status, int) {
      if (!status.ok()) ++failed;
      if (--open == 0) all.set_value();
    };
    std::vector<std::string> got(kRanks * kMessages);
    std::mt19937 random(me);
    char* heap = host_->heap(me);
    std::vector<int> order;
    for (int i = 0; i < 2 * kRanks; ++i) order.push_back(i);
    for (int i = 0; i < kMessages; ++i) {
      std::shuffle(order.begin(), order.end(), random);
      for (int what : order) {
        const int peer = what / 2;
        if (what % 2 == 0) {
          const int64_t bytes = size_of(me, peer, i);
          std::memset(heap, byte_of(me, peer, i), bytes);
          channels_[me]->Send(peer, i % 5, heap, bytes, done);
          heap += bytes;
        } else {
          std::string& text = got[peer * kMessages + i];
          text.resize(size_of(peer, me, i));
          channels_[me]->Receive(peer, i % 5, text.data(), text.size(), done);
        }
      }
    }
    all.get_future().wait();
    EXPECT_EQ(failed, 0);
    for (int peer = 0; peer < kRanks; ++peer) {
      for (int i = 0; i < kMessages; ++i) {
        EXPECT_EQ(got[peer * kMessages + i],
                  std::string(size_of(peer, me, i), byte_of(peer, me, i)));
      }
    }
  };
  std::vector<std::thread> threads;
  for (int r = 0; r < kRanks; ++r) threads.emplace_back(rank, r);
  for (std::thread& thread : threads) thread.join();
}

TEST_F(ChannelsTest, FromAnyRankSaysFromWhich) {
  Make(3);
  int from_1 = 1, from_2 = 2;
  End sends[2];
  channels_[1]->Send(0, 4, &from_1, sizeof(int), sends[0].Done());
  channels_[2]->Send(0, 4, &from_2, sizeof(int), sends[1].Done());
  for (int i = 0; i < 2; ++i) {
    int got = 0;
    End receive;
    channels_[0]->Receive(Channels::kAnyPeer, 4, &got, sizeof(got),
                          receive.Done());
    TESSERA_EXPECT_OK(receive.Wait());
    EXPECT_EQ(got, receive.peer());
  }
}

TEST_F(ChannelsTest, AnotherSizeIsRefusedAndOnlyThat) {
  Make(2);
  std::string sent(10, 'a');
  for (int64_t bytes : {int64_t{3}, int64_t{20}}) {
    std::string got(bytes, '\0');
    End send, receive;
    channels_[1]->Receive(0, 2, got.data(), bytes, receive.Done());
    channels_[0]->Send(1, 2, sent.data(), 10, send.Done());
    EXPECT_THAT(
        receive.Wait(),
        StatusIs(absl::StatusCode::kInvalidArgument,
                 HasSubstr(absl::StrCat("receive from rank 0, tag 2: expected ",
                                        bytes, " bytes, rank 0 sends 10"))));
    TESSERA_EXPECT_OK(send.Wait());
  }
  std::string got(10, '\0');
  End send, receive;
  channels_[0]->Send(1, 2, sent.data(), 10, send.Done());
  channels_[1]->Receive(0, 2, got.data(), 10, receive.Done());
  TESSERA_EXPECT_OK(receive.Wait());
  EXPECT_EQ(got, sent);
}

TEST_F(ChannelsTest, NobodyComesWithinTheTimeout) {
  Channels::Options options;
  options.timeout = absl::Milliseconds(300);
  Make(2, options);
  char byte;
  End receive, later;
  channels_[1]->Receive(0, 5, &byte, 1, receive.Done());
  EXPECT_THAT(receive.Wait(),
              StatusIs(absl::StatusCode::kDeadlineExceeded,
                       HasSubstr("receive from rank 0, tag 5: nothing has come "
                                 "of it within 300ms")));
  channels_[1]->Send(0, 5, &byte, 1, later.Done());
  EXPECT_THAT(later.Wait(), StatusIs(absl::StatusCode::kDeadlineExceeded));
}

TEST_F(ChannelsTest, ShortMessagesThatNobodyReadsTimeOut) {
  Channels::Options options;
  options.timeout = absl::Milliseconds(300);
  Make(2, options);
  std::string data(kInlineBytes, 'a');
  End sends[20];
  for (End& send : sends) {
    channels_[0]->Send(1, 3, data.data(), kInlineBytes, send.Done());
  }
  TESSERA_EXPECT_OK(sends[0].Wait());
  EXPECT_THAT(sends[19].Wait(),
              StatusIs(absl::StatusCode::kDeadlineExceeded,
                       HasSubstr("send to rank 1, tag 3: nothing has come of "
                                 "it within 300ms")));
}

TEST_F(ChannelsTest, WhoWaitsForARankThatGaveUpIsTold) {
  Make(3);
  char byte;
  End receive, any;
  channels_[1]->Receive(0, 0, &byte, 1, receive.Done());
  channels_[0]->Abort(absl::UnavailableError("rank 0 has had enough"));
  EXPECT_THAT(receive.Wait(),
              StatusIs(absl::StatusCode::kUnavailable,
                       HasSubstr("rank 0 has given up its messages")));
  channels_[2]->Receive(Channels::kAnyPeer, 0, &byte, 1, any.Done());
  EXPECT_THAT(any.Wait(), StatusIs(absl::StatusCode::kUnavailable,
                                   HasSubstr("has given up its messages")));
}

TEST_F(ChannelsTest, AMessageThatItsSenderGaveUpIsNotReceived) {
  Make(2);
  End send, receive;
  channels_[0]->Send(1, 0, host_->heap(0), 1 << 16, send.Done());
  channels_[0]->Abort(absl::UnavailableError("rank 0 has had enough"));
  EXPECT_THAT(send.Wait(), StatusIs(absl::StatusCode::kUnavailable,
                                    HasSubstr("had enough")));
  std::string got(1 << 16, '\0');
  channels_[1]->Receive(0, 0, got.data(), 1 << 16, receive.Done());
  EXPECT_THAT(receive.Wait(),
              StatusIs(absl::StatusCode::kUnavailable,
                       HasSubstr("rank 0, tag 0: its sender gave it up")));
}

// What a rank wrote before it went is received; then its end is told.
TEST_F(ChannelsTest, ARankThatIsGone) {
  std::atomic<bool> gone{false};
  Channels::Options options;
  options.gone = [&](int peer) {
    return gone && peer == 0 ? absl::UnavailableError("rank 0 has ended")
                             : absl::OkStatus();
  };
  Make(3, options);
  int sent = 6, got = 0;
  End send, first, second, other;
  channels_[0]->Send(1, 0, &sent, sizeof(sent), send.Done());
  gone = true;
  channels_[1]->Receive(2, 0, &got, sizeof(got), other.Done());
  channels_[1]->Receive(0, 0, &got, sizeof(got), first.Done());
  TESSERA_EXPECT_OK(first.Wait());
  EXPECT_EQ(got, 6);
  EXPECT_FALSE(other.ended());
  channels_[1]->Receive(0, 0, &got, sizeof(got), second.Done());
  EXPECT_THAT(second.Wait(), StatusIs(absl::StatusCode::kUnavailable,
                                      HasSubstr("rank 0 has ended")));
}

}  // namespace
}  // namespace tessera::shm
