// What a save does while training goes on: pieces that are copied in time, and
// notes of ranks that are silent.
#include <atomic>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "ATen/Functions.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/memory/memory.h"
#include "base/status_matchers.h"
#include "checkpoint/save/save_notes.h"
#include "checkpoint/save/saved_pieces.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tessera {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kNumel = 100'000;  // memory of its own

std::vector<SavedPiece> TwoPieces() {
  return {{0, 0, 0, at::full({kNumel}, 1.0), /*lasts=*/false},
          {0, 1, 0, at::full({kNumel}, 2.0), /*lasts=*/true}};
}

// All elements of a piece, or -1 if they differ.
float ValueOf(SavedPieces* pieces, size_t i) {
  std::string scratch;
  const absl::string_view bytes =
      pieces->Part(i, 0, kNumel * sizeof(float), &scratch).value();
  std::vector<float> values(kNumel);
  std::memcpy(values.data(), bytes.data(), bytes.size());
  for (float value : values) {
    if (value != values[0]) return -1;
  }
  return values[0];
}

TEST(SavedPiecesTest, WhatDoesNotLastIsCopiedAtOnceAndTheRestByDetach) {
  const std::vector<SavedPiece> live = TwoPieces();
  SavedPieces pieces(live);
  TESSERA_ASSERT_OK(pieces.Keep());
  live[0].elements.fill_(10);
  EXPECT_EQ(ValueOf(&pieces, 0), 1);
  live[1].elements.fill_(3);  // nothing has been copied of it
  EXPECT_EQ(ValueOf(&pieces, 1), 3);
  pieces.Detach();
  live[1].elements.fill_(20);
  EXPECT_EQ(ValueOf(&pieces, 0), 1);
  EXPECT_EQ(ValueOf(&pieces, 1), 3);
}

TEST(SavedPiecesTest, WhatIsWrittenCostsNoMemory) {
  const int64_t before = MemoryLedger::Global().total().current_bytes;
  const auto held = [&] {
    return MemoryLedger::Global().total().current_bytes - before;
  };
  const int64_t bytes = kNumel * static_cast<int64_t>(sizeof(float));
  SavedPieces pieces(TwoPieces());
  TESSERA_ASSERT_OK(pieces.Keep());
  EXPECT_EQ(held(), bytes);
  pieces.Written(0);
  EXPECT_EQ(held(), 0);
  pieces.Written(1);
  pieces.Detach();
  EXPECT_EQ(held(), 0);
}

TEST(SavedPiecesTest, WithoutMemoryDetachWaitsUntilAllIsWritten) {
  MemoryLedger& ledger = MemoryLedger::Global();
  const int64_t limit = ledger.limit_bytes();
  const std::vector<SavedPiece> live = TwoPieces();
  SavedPieces pieces(live);
  TESSERA_ASSERT_OK(pieces.Keep());
  ledger.SetLimit(ledger.total().current_bytes);
  std::atomic<bool> detached{false};
  std::thread training([&] {
    pieces.Detach();
    detached = true;
    live[1].elements.fill_(20);
  });
  // Whichever comes first, it is not overwritten before it is written.
  EXPECT_EQ(ValueOf(&pieces, 1), 2);
  pieces.Written(0);
  EXPECT_EQ(ValueOf(&pieces, 1), 2);
  EXPECT_FALSE(detached);
  pieces.Written(1);
  training.join();
  ledger.SetLimit(0);
  EXPECT_EQ(SavedPieces(live).Keep().code(),
            absl::StatusCode::kResourceExhausted);
  ledger.SetLimit(limit);
}

TEST(SavedPiecesTest, AfterAbandonNobodyWaitsOrReads) {
  SavedPieces pieces(TwoPieces());
  TESSERA_ASSERT_OK(pieces.Keep());
  pieces.Abandon();
  pieces.Detach();
  std::string scratch;
  EXPECT_EQ(pieces.Part(1, 0, 4, &scratch).status().code(),
            absl::StatusCode::kCancelled);
}

// ---- notes

class FakeBoard : public NoteBoard {
 public:
  bool Write(const std::string& text) override {
    written = text;
    return true;
  }
  std::optional<std::vector<std::string>> Read(
      const std::vector<int>& ranks) override {
    if (silent) return std::nullopt;
    std::vector<std::string> all;
    for (int r : ranks) all.push_back(notes[r]);
    return all;
  }
  absl::Status EndOf(int rank) const override {
    return rank == ended ? absl::UnavailableError("rank 1 has ended")
                         : absl::OkStatus();
  }
  absl::Duration patience() const override { return absl::Milliseconds(20); }

  std::string written;
  std::map<int, std::string> notes;
  int ended = -1;
  bool silent = false;
};

constexpr uint64_t kId = 0xabc;

TEST(SaveNotesTest, ANoteOfAnotherSaveIsNone) {
  FakeBoard board;
  SaveNotes notes(&board, kId, 3);
  board.notes[1] = "0000000000000def 1 written file";
  board.notes[2] = "0000000000000abc 7 written a file\nof bytes";
  const auto read = notes.Read({0, 1, 2});
  ASSERT_TRUE(read.has_value());
  EXPECT_EQ((*read)[0].kind, "");
  EXPECT_EQ((*read)[1].kind, "");
  EXPECT_EQ((*read)[2].kind, "written");
  EXPECT_EQ((*read)[2].text, "a file\nof bytes");
  EXPECT_TRUE(notes.Tell("seen", ""));
  EXPECT_EQ(board.written, "0000000000000abc 1 seen ");
}

TEST(SaveNotesTest, ARankThatSaysNothingNewIsMissedAndABusyOneIsNot) {
  for (const bool silent : {false, true}) {
    FakeBoard board;
    SaveNotes notes(&board, kId, 2);
    const auto note = [&]() -> std::optional<SaveNote> {
      const auto read = notes.Read({1});
      if (!read.has_value()) return std::nullopt;
      return (*read)[0];
    };
    for (int beat = 0; beat < 10; ++beat) {
      board.notes[1] = absl::StrCat("0000000000000abc ", beat, " busy ");
      absl::SleepFor(absl::Milliseconds(5));
      TESSERA_ASSERT_OK(notes.CheckAlive(1, note()));
    }
    board.silent = silent;
    absl::Status alive;
    const absl::Time until = absl::Now() + absl::Seconds(10);
    while (alive.ok() && absl::Now() < until) {
      alive = notes.CheckAlive(1, note());
    }
    EXPECT_EQ(alive.code(), absl::StatusCode::kDeadlineExceeded);
    EXPECT_THAT(alive.message(), HasSubstr("rank 1"));
  }
}

TEST(SaveNotesTest, ARankThatHasEndedIsNamedAtOnce) {
  FakeBoard board;
  board.ended = 1;
  SaveNotes notes(&board, kId, 2);
  EXPECT_EQ(notes.CheckAlive(1, std::nullopt).code(),
            absl::StatusCode::kUnavailable);
}

}  // namespace
}  // namespace tessera
