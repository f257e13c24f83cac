// Tests what a save does while training goes on: it copies pieces in time, and
// notices ranks that are silent.
#include <atomic>
#include <cstring>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "ATen/Functions.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/memory/memory.h"
#include "base/status.h"
#include "base/status_matchers.h"
#include "checkpoint/disk/folder.h"
#include "checkpoint/format/checkpoint_folder.h"
#include "checkpoint/save/save_course.h"
#include "checkpoint/save/save_notes.h"
#include "checkpoint/save/saved_pieces.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tessera {
namespace {

using ::testing::ElementsAre;
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
  pieces.Detach();  // by each step while the save goes on
  live[1].elements.fill_(20);
  EXPECT_EQ(ValueOf(&pieces, 0), 1);
  EXPECT_EQ(ValueOf(&pieces, 1), 3);
}

// Two numbers in a block of three bytes, which are multiplied with the third.
SavedPiece PieceInBlocks(const at::Tensor& bytes, int64_t numel) {
  SavedPiece piece = {0, 0, 0, bytes, /*lasts=*/true};
  piece.format = ElementFormat::Blocks(2, 3);
  piece.part = {0, numel};
  piece.decode = [](const char* blocks, int64_t n, float* to) {
    for (int64_t i = 0; i < n; ++i) {
      const char* const block = blocks + i / 2 * 3;
      to[i] = static_cast<float>(block[i % 2] * block[2]);
    }
  };
  return piece;
}

TEST(SavedPiecesTest, BlocksAreDecodedAsTheyAreWritten) {
  const auto bytes_of = [](int64_t numel) {
    return numel * static_cast<int64_t>(sizeof(float));
  };
  const at::Tensor live =
      at::tensor({1, 2, 10, 3, 4, 20, 5, 6, 30}).to(at::kChar);
  const SavedPiece piece = PieceInBlocks(live, 5);
  EXPECT_EQ(piece.numel(), 5);
  EXPECT_EQ(piece.bytes(), bytes_of(5));
  SavedPieces pieces({piece});
  const auto numbers = [&](int64_t begin, int64_t numel) {
    std::string scratch;
    const absl::string_view part =
        pieces.Part(0, bytes_of(begin), bytes_of(numel), &scratch).value();
    std::vector<float> values(static_cast<size_t>(numel));
    std::memcpy(values.data(), part.data(), part.size());
    return values;
  };
  EXPECT_THAT(numbers(0, 5), ElementsAre(10, 20, 60, 80, 150));
  TESSERA_ASSERT_OK(pieces.Keep());
  EXPECT_THAT(numbers(2, 3), ElementsAre(60, 80, 150));
  const int64_t before = MemoryLedger::Host().total().current_bytes;
  pieces.Detach();
  // Copied as they are kept, in whole lines of the cache.
  EXPECT_EQ(MemoryLedger::Host().total().current_bytes - before, 64);
  live.zero_();
  EXPECT_THAT(numbers(0, 5), ElementsAre(10, 20, 60, 80, 150));
  EXPECT_THAT(numbers(4, 1), ElementsAre(150));
}

TEST(SavedPiecesTest, WhatIsWrittenCostsNoMemory) {
  const int64_t before = MemoryLedger::Host().total().current_bytes;
  const auto held = [&] {
    return MemoryLedger::Host().total().current_bytes - before;
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
  MemoryLedger& ledger = MemoryLedger::Host();
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
  // What is written leaves memory, which a later Detach would take.
  while (!pieces.awaited()) std::this_thread::yield();
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
    if (on_write) on_write();
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
  absl::Duration patience() const override { return longest_silence; }

  std::string written;
  std::function<void()> on_write;
  absl::Duration longest_silence;  // none
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
  const std::vector<SaveNote> read = notes.Read({0, 1, 2});
  EXPECT_FALSE(read[0].silent);
  EXPECT_EQ(read[0].kind, "");
  EXPECT_EQ(read[1].kind, "");
  EXPECT_EQ(read[2].kind, "written");
  EXPECT_EQ(read[2].text, "a file\nof bytes");
  EXPECT_TRUE(notes.Tell("seen", ""));
  EXPECT_EQ(board.written, "0000000000000abc 1 seen ");
}

TEST(SaveNotesTest, ARankThatSaysNothingNewIsMissedAndABusyOneIsNot) {
  for (const bool silent : {false, true}) {
    FakeBoard board;
    SaveNotes notes(&board, kId, 2);
    const auto note = [&] { return notes.Read({1})[0]; };
    for (int beat = 0; beat < 10; ++beat) {
      board.notes[1] = absl::StrCat("0000000000000abc ", beat, " busy ");
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
  board.silent = true;
  EXPECT_EQ(notes.CheckAlive(1, notes.Read({1})[0]).code(),
            absl::StatusCode::kUnavailable);
}

// ---- another rank than 0

class OtherRankTest : public testing::Test {
 protected:
  OtherRankTest() {
    std::filesystem::remove_all(dir_);
    board_.longest_silence = absl::Minutes(1);
    proto::CheckpointFile file;
    file.set_bytes(10);
    file.set_index_offset(0);
    file.set_index_bytes(10);
    file.set_index_crc(1);
    board_.notes[0] =
        absl::StrCat("0000000000000abc 1 written ", file.SerializeAsString());
  }

  // Rank 1, which hears of rank 0, once it has committed here or, without a
  // folder of its own, written, that the save has `how` ended with `end`;
  // nullopt: rank 0 has ended.
  absl::Status Run(const char* how, const std::optional<absl::Status>& end,
                   bool node_local = true) {
    board_.on_write = [=] {
      const char* const last = node_local ? " committed " : " written ";
      if (!absl::StrContains(board_.written, last)) return;
      EXPECT_EQ(Names().size(), node_local ? 3u : 1u);
      if (end.has_value()) {
        board_.notes[0] =
            absl::StrCat("0000000000000abc 2 ", how, " ", StatusToText(*end));
      } else {
        board_.ended = 0;
      }
    };
    SavePlan plan;
    plan.dir = dir_;
    plan.rank = 1;
    plan.world_size = 2;
    plan.id = kId;
    plan.options.node_local = node_local;
    plan.options.after_commit = [this] { committed_ = true; };
    if (node_local) {
      plan.leaders = {0, 1};
      plan.saving = std::make_unique<Saving>(
          Saving::BeginPart(plan.dir, /*replace=*/false, FileSystem::Real())
              .value());
      plan.saving->TakePart(kId, {1});
    } else {
      TESSERA_EXPECT_OK(Folder::Make(plan.dir, FileSystem::Real()).status());
    }
    proto::CheckpointStorage* const storage = plan.head.add_storages();
    storage->set_numel(kNumel);
    proto::CheckpointTensor* const tensor = storage->add_tensors();
    tensor->set_name("weight");
    tensor->add_sizes(kNumel);
    tensor->add_strides(1);
    for (const char* name : {"value", "exp_avg"}) {
      proto::CheckpointState* const state = storage->add_states();
      state->set_name(name);
      state->set_dtype("F32");
    }
    SavedPieces pieces(TwoPieces());
    return SaveCourse(std::move(plan), &pieces, &board_).Run();
  }
  std::vector<std::string> Names() {
    return Folder::Open(dir_, FileSystem::Real())->Names().value();
  }

  const std::string dir_ = absl::StrCat(testing::TempDir(), "other_host");
  FakeBoard board_;
  bool committed_ = false;
};

TEST_F(OtherRankTest, CommitsAfterAllHaveWritten) {
  TESSERA_EXPECT_OK(Run("ended", absl::OkStatus()));
  EXPECT_TRUE(committed_);
  EXPECT_THAT(Names(),
              ElementsAre("0000000000000abc.rank-00001", "lock", "manifest"));
}

TEST_F(OtherRankTest, TakesItBackIfTheSaveHasFailed) {
  EXPECT_EQ(Run("undone", absl::DataLossError("of rank 0")),
            absl::DataLossError("of rank 0"));
  EXPECT_FALSE(committed_);
  // The error includes the folder that it has made.
  EXPECT_TRUE(
      absl::IsNotFound(Folder::Open(dir_, FileSystem::Real()).status()));
}

// The manifest of all ranks' folder may name it.
TEST_F(OtherRankTest, LeavesItsFileWhereTheNewOneMayBeInPlace) {
  const absl::Status unsure = absl::DataLossError("may be in place already");
  EXPECT_EQ(Run("ended", unsure, /*node_local=*/false), unsure);
  EXPECT_THAT(Names(), ElementsAre("0000000000000abc.rank-00001"));
}

TEST_F(OtherRankTest, RemovesItsFileOfASaveThatWasTakenBack) {
  const absl::Status failed = absl::DataLossError("of rank 0");
  EXPECT_EQ(Run("undone", failed, /*node_local=*/false), failed);
  EXPECT_THAT(Names(), testing::IsEmpty());
}

// Other hosts may have committed.
TEST_F(OtherRankTest, KeepsItIfNobodySaysHowItEnded) {
  EXPECT_THAT(Run("", std::nullopt),
              StatusIs(absl::StatusCode::kUnavailable,
                       HasSubstr("may be whole or not")));
  EXPECT_FALSE(committed_);
  EXPECT_EQ(Names().size(), 3u);
}

}  // namespace
}  // namespace tessera
