#include "offload/tiered_buffer.h"

#include <errno.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "base/memory/ledger.h"
#include "base/status_matchers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "offload/disk/swap_file.h"
#include "offload/disk/swap_test_util.h"
#include "torch/torch.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr int64_t kPage = kSwapAlignment;  // 1024 elements of float32

// Elements, no two of which are the same.
at::Tensor Numbers(int64_t numel, at::ScalarType dtype = at::kFloat) {
  return torch::arange(1, numel + 1, dtype).mul_(0.5);
}

// By uring or threads (swap_test_util.h).
class TieredBufferTest : public SwapFileTest {
 protected:
  // `in_memory`: without a disk.
  TieredBuffer Allocate(int64_t numel, at::ScalarType dtype = at::kFloat,
                        bool in_memory = false) {
    if (file_ == nullptr) file_ = Open();
    auto buffer =
        TieredBuffer::Allocate(numel, dtype, at::kCPU, MemoryKind::kOptimizer,
                               PlaceOf(in_memory), "moments");
    TESSERA_EXPECT_OK(buffer);
    return *std::move(buffer);
  }
  TieredBuffer::Place PlaceOf(bool in_memory) const {
    if (in_memory) return {};
    return {Tier::kDisk, file_};
  }
  TieredBuffer AllocateWith(const at::Tensor& values, bool in_memory = false) {
    TieredBuffer buffer =
        Allocate(values.numel(), values.scalar_type(), in_memory);
    Write(&buffer, values);
    return buffer;
  }
  static void Write(TieredBuffer* buffer, const at::Tensor& values) {
    TESSERA_ASSERT_OK(buffer->Raise());
    buffer->View().copy_(values);
    TESSERA_ASSERT_OK(buffer->Lower(/*changed=*/true));
  }
  static void ExpectHolds(TieredBuffer* buffer, const at::Tensor& values) {
    TESSERA_ASSERT_OK_AND_ASSIGN(const Raised raised, Raised::Of(buffer));
    EXPECT_TRUE(at::equal(buffer->View(), values));
  }
  // Requests of that kind fail from now on.
  void Fail(bool writes) {
    system_.answer = [=](bool write, int64_t, int64_t result) {
      return write == writes ? -EIO : result;
    };
  }
  static auto IsError(const char* doing) {
    return StatusIs(absl::StatusCode::kUnavailable,
                    AllOf(HasSubstr("[rank 3]"), HasSubstr(doing),
                          HasSubstr("of moments")));
  }

  std::shared_ptr<SwapFile> file_;
};

INSTANTIATE_TEST_SUITE_P(, TieredBufferTest, ::testing::Bool(),
                         [](const auto& info) {
                           return info.param ? "Uring" : "Threads";
                         });

TEST_P(TieredBufferTest, SaysWhatItIs) {
  TieredBuffer none;
  EXPECT_FALSE(none.defined());
  EXPECT_EQ(none.numel(), 0);
  EXPECT_EQ(none.bytes(), 0);
  EXPECT_FALSE(none.in_memory());
  for (const bool in_memory : {false, true}) {
    TieredBuffer buffer = Allocate(1500, at::kDouble, in_memory);
    EXPECT_TRUE(buffer.defined());
    EXPECT_EQ(buffer.numel(), 1500);
    EXPECT_EQ(buffer.dtype(), at::kDouble);
    EXPECT_EQ(buffer.bytes(), 12000);
    EXPECT_EQ(buffer.what(), "moments");
    EXPECT_EQ(buffer.on_disk(), !in_memory);
    EXPECT_EQ(buffer.room().disk().get(), in_memory ? nullptr : file_.get());
    EXPECT_EQ(buffer.in_memory(), in_memory);
    EXPECT_EQ(buffer.resident_bytes(), in_memory ? 12000 : 0);
    EXPECT_EQ(buffer.room().extent().bytes, in_memory ? 0 : 3 * kPage);
    TESSERA_EXPECT_OK(buffer.Raise());
    EXPECT_EQ(buffer.resident_bytes(), 12000);
    buffer.Reset();
    EXPECT_FALSE(buffer.defined());
    EXPECT_EQ(buffer.resident_bytes(), 0);
  }
}

TEST_P(TieredBufferTest, ElementsInBlocksAreBytes) {
  file_ = Open();
  const at::Tensor bytes = torch::randint(256, {4 * 68}, at::kByte);
  for (const bool in_memory : {false, true}) {
    TESSERA_ASSERT_OK_AND_ASSIGN(
        TieredBuffer buffer,
        TieredBuffer::Allocate(200, ElementFormat::Blocks(64, 68), at::kCPU,
                               MemoryKind::kOptimizer, PlaceOf(in_memory),
                               "moments"));
    EXPECT_EQ(buffer.numel(), 200);
    EXPECT_EQ(buffer.bytes(), 4 * 68);
    EXPECT_EQ(buffer.dtype(), at::kByte);
    EXPECT_TRUE(buffer.format().in_blocks());
    Write(&buffer, bytes);
    ExpectHolds(&buffer, bytes);
    at::Tensor two = torch::zeros({2 * 68}, at::kByte);
    TESSERA_EXPECT_OK(buffer.CopyTo({64, 192}, two));
    EXPECT_TRUE(two.equal(bytes.slice(0, 68, 3 * 68)));
    TESSERA_ASSERT_OK(buffer.Raise());
    EXPECT_EQ(buffer.resident_bytes(), 4 * 68);
    EXPECT_TRUE(buffer.View({64, 200}).equal(bytes.slice(0, 68)));
    buffer.Drop();
    // And elsewhere.
    TESSERA_ASSERT_OK(buffer.Move(PlaceOf(!in_memory)));
    ExpectHolds(&buffer, bytes);
  }
}

TEST_P(TieredBufferTest, WhatNobodyWroteIsZerosAndCostsNothing) {
  // Others have written there.
  AllocateWith(Numbers(3000));
  const SwapStats before = file_->stats();
  TieredBuffer buffer = Allocate(3000);
  EXPECT_EQ(file_->stats().file_bytes, before.file_bytes);
  EXPECT_TRUE(buffer.room().zeros());
  ExpectHolds(&buffer, torch::zeros({3000}));
  TESSERA_EXPECT_OK(buffer.Raise());
  TESSERA_EXPECT_OK(buffer.Lower(/*changed=*/false));
  EXPECT_TRUE(buffer.room().zeros());
  std::vector<char> got(12000, 'x');
  TESSERA_EXPECT_OK(buffer.ReadBytes(0, 12000, got.data()));
  EXPECT_EQ(got, std::vector<char>(12000));
  EXPECT_EQ(file_->stats().bytes_read, before.bytes_read);
  EXPECT_EQ(file_->stats().bytes_written, before.bytes_written);

  // Who writes all of it elsewhere says so.
  const at::Tensor values = Numbers(3000);
  TESSERA_EXPECT_OK(file_
                        ->Write(buffer.room().extent(), 0,
                                values.const_data_ptr(), buffer.bytes(), "a")
                        .Wait());
  buffer.room().SetWritten();
  EXPECT_FALSE(buffer.room().zeros());
  ExpectHolds(&buffer, values);
  TieredBuffer in_memory = Allocate(3000, at::kFloat, /*in_memory=*/true);
  EXPECT_TRUE(at::equal(in_memory.View(), torch::zeros({3000})));
}

// A save reads on its own thread what a call raises meanwhile.
TEST_P(TieredBufferTest, ReadsTheDiskWhileAnotherThreadRaises) {
  const at::Tensor values = Numbers(5000);
  TieredBuffer buffer = AllocateWith(values);
  std::atomic<bool> done{false};
  std::thread raises([&] {
    while (!done) {
      TESSERA_EXPECT_OK(Raised::Of(&buffer));
    }
  });
  for (int i = 0; i < 300; ++i) {
    at::Tensor got = torch::zeros({5000});
    TESSERA_EXPECT_OK(buffer.ReadBytes(
        0, buffer.bytes(), static_cast<char*>(got.mutable_data_ptr())));
    EXPECT_TRUE(at::equal(got, values));
  }
  done = true;
  raises.join();
}

TEST_P(TieredBufferTest, WhatIsLoweredAsChangedComesBack) {
  for (const at::ScalarType dtype : {at::kFloat, at::kDouble}) {
    for (const int64_t numel : {0, 1, 511, 512, 1024, 5001}) {
      TieredBuffer buffer = AllocateWith(Numbers(numel, dtype));
      EXPECT_FALSE(buffer.in_memory());
      EXPECT_FALSE(buffer.room().zeros());
      EXPECT_EQ(buffer.resident_bytes(), 0);
      ExpectHolds(&buffer, Numbers(numel, dtype));
      Write(&buffer, Numbers(numel, dtype).neg());
      ExpectHolds(&buffer, Numbers(numel, dtype).neg());
    }
  }
}

TEST_P(TieredBufferTest, WhatIsLoweredAsUnchangedIsDropped) {
  TieredBuffer buffer = AllocateWith(Numbers(2000));
  const int64_t written = file_->stats().bytes_written;
  TESSERA_ASSERT_OK(buffer.Raise());
  buffer.View().fill_(7);
  TESSERA_EXPECT_OK(buffer.Raise());  // is raised already
  EXPECT_EQ(buffer.View()[1999].item<float>(), 7);
  TESSERA_EXPECT_OK(buffer.Lower(/*changed=*/false));
  EXPECT_FALSE(buffer.in_memory());
  TESSERA_EXPECT_OK(buffer.Lower(/*changed=*/true));  // is lowered already
  EXPECT_EQ(file_->stats().bytes_written, written);
  ExpectHolds(&buffer, Numbers(2000));
}

TEST_P(TieredBufferTest, InMemoryItStaysThere) {
  TieredBuffer buffer = Allocate(2000, at::kFloat, /*in_memory=*/true);
  Write(&buffer, Numbers(2000));
  const void* const data = buffer.View().const_data_ptr();
  TESSERA_EXPECT_OK(buffer.Lower(/*changed=*/false));
  buffer.Drop();
  ExpectHolds(&buffer, Numbers(2000));
  EXPECT_TRUE(buffer.in_memory());
  EXPECT_EQ(buffer.View().const_data_ptr(), data);
}

TEST_P(TieredBufferTest, RaisedIsForItsScope) {
  TieredBuffer buffer = AllocateWith(Numbers(10));
  {
    TESSERA_ASSERT_OK_AND_ASSIGN(Raised outer, Raised::Of(&buffer));
    buffer.View().fill_(7);
    { TESSERA_ASSERT_OK_AND_ASSIGN(const Raised inner, Raised::Of(&buffer)); }
    EXPECT_TRUE(buffer.in_memory());
    const Raised moved = std::move(outer);
    EXPECT_TRUE(buffer.in_memory());
  }
  EXPECT_FALSE(buffer.in_memory());
  ExpectHolds(&buffer, Numbers(10));  // nobody has lowered the change
  {
    TESSERA_ASSERT_OK_AND_ASSIGN(const Raised raised, Raised::Of(&buffer));
    buffer.View().fill_(8);
    TESSERA_EXPECT_OK(buffer.Lower(/*changed=*/true));
    EXPECT_FALSE(buffer.in_memory());
  }
  ExpectHolds(&buffer, torch::full({10}, 8.f));
  {
    TESSERA_ASSERT_OK_AND_ASSIGN(Raised raised, Raised::Of(&buffer));
    raised.View().fill_(9);
    TESSERA_EXPECT_OK(raised.Commit());
    EXPECT_FALSE(buffer.in_memory());
  }
  ExpectHolds(&buffer, torch::full({10}, 9.f));
  TieredBuffer none;
  TESSERA_EXPECT_OK(Raised::Of(nullptr));
  TESSERA_EXPECT_OK(Raised::Of(&none));
  EXPECT_FALSE(none.in_memory());
}

TEST_P(TieredBufferTest, ReadsBytesFromAnyPlace) {
  const at::Tensor values = Numbers(5001);
  const char* const want = static_cast<const char*>(values.const_data_ptr());
  TieredBuffer disk = AllocateWith(values), raised = AllocateWith(values);
  TESSERA_ASSERT_OK(raised.Raise());
  TieredBuffer memory = AllocateWith(values, /*in_memory=*/true);
  for (const TieredBuffer* buffer : {&disk, &raised, &memory}) {
    for (const int64_t begin : {int64_t{0}, int64_t{1}, kPage - 1, kPage,
                                kPage + 1, 2 * kBlock + 3, int64_t{20003}}) {
      for (const int64_t most :
           {int64_t{0}, int64_t{1}, int64_t{100}, kPage - 1, kPage, kPage + 1,
            buffer->bytes()}) {
        const int64_t bytes = std::min(most, buffer->bytes() - begin);
        std::vector<char> got(static_cast<size_t>(bytes + 1), 'x');
        TESSERA_ASSERT_OK(buffer->ReadBytes(begin, bytes, got.data()));
        EXPECT_EQ(
            std::memcmp(got.data(), want + begin, static_cast<size_t>(bytes)),
            0)
            << begin << " " << bytes;
        EXPECT_EQ(got.back(), 'x') << begin << " " << bytes;
      }
    }
  }
  EXPECT_FALSE(disk.in_memory());
}

TEST_P(TieredBufferTest, AMovedOneKeepsItsPlace) {
  TieredBuffer from = AllocateWith(Numbers(1024));
  TESSERA_ASSERT_OK(from.Raise());
  const int64_t begin = from.room().extent().begin;
  TieredBuffer to(std::move(from));
  EXPECT_FALSE(from.defined());  // NOLINT: is what is tested
  EXPECT_FALSE(from.on_disk());
  EXPECT_EQ(from.resident_bytes(), 0);
  from.Reset();  // frees nothing
  EXPECT_TRUE(at::equal(to.View(), Numbers(1024)));
  TESSERA_EXPECT_OK(to.Lower(/*changed=*/false));
  EXPECT_EQ(to.room().extent().begin, begin);
  EXPECT_EQ(to.what(), "moments");
  EXPECT_NE(Allocate(1024).room().extent().begin, begin);
  ExpectHolds(&to, Numbers(1024));
}

TEST_P(TieredBufferTest, RoomIsUsedAgain) {
  const auto file_bytes = [&] { return file_->stats().file_bytes; };
  TieredBuffer one = Allocate(2048), two = Allocate(2048);
  const int64_t first = one.room().extent().begin,
                second = two.room().extent().begin;
  EXPECT_EQ(file_bytes(), 4 * kPage);
  one.Reset();
  one = Allocate(2048);
  EXPECT_EQ(one.room().extent().begin, first);
  one = std::move(two);  // frees what it had, and keeps what it gets
  two = Allocate(2048);
  EXPECT_EQ(one.room().extent().begin, second);
  EXPECT_EQ(two.room().extent().begin, first);
  EXPECT_EQ(file_bytes(), 4 * kPage);
  { const TieredBuffer three = Allocate(2048); }
  EXPECT_EQ(file_bytes(), 6 * kPage);
  const TieredBuffer three = Allocate(2048);
  EXPECT_EQ(file_bytes(), 6 * kPage);
}

TEST_P(TieredBufferTest, AFullDiskNamesIt) {
  file_ = Open();
  system_.allocate_error = ENOSPC;
  EXPECT_THAT(
      TieredBuffer::Allocate(10, at::kFloat, at::kCPU, MemoryKind::kOptimizer,
                             {Tier::kDisk, file_}, "exp_avg of unit x"),
      StatusIs(absl::StatusCode::kResourceExhausted,
               AllOf(HasSubstr("exp_avg of unit x"), HasSubstr("[rank 3]"))));
}

TEST_P(TieredBufferTest, AFailedReadNamesItAndLeavesItBelow) {
  TieredBuffer buffer = AllocateWith(Numbers(2000));
  Fail(/*writes=*/false);
  EXPECT_THAT(buffer.Raise(), IsError("reading"));
  EXPECT_FALSE(buffer.in_memory());
  EXPECT_THAT(Raised::Of(&buffer), IsError("reading"));
  std::vector<char> got(100);
  EXPECT_THAT(buffer.ReadBytes(0, 100, got.data()), IsError("reading"));
  EXPECT_THAT(buffer.ReadBytes(5, 100, got.data()), IsError("reading"));
  system_.answer = nullptr;
  ExpectHolds(&buffer, Numbers(2000));
}

TEST_P(TieredBufferTest, AFailedWriteNamesItAndLeavesItRaised) {
  TieredBuffer buffer = Allocate(2000);
  TESSERA_ASSERT_OK(buffer.Raise());
  buffer.View().copy_(Numbers(2000));
  Fail(/*writes=*/true);
  EXPECT_THAT(buffer.Lower(/*changed=*/true), IsError("writing"));
  ASSERT_TRUE(buffer.in_memory());
  EXPECT_TRUE(buffer.room().zeros());
  EXPECT_TRUE(at::equal(buffer.View(), Numbers(2000)));
  system_.answer = nullptr;
  TESSERA_EXPECT_OK(buffer.Lower(/*changed=*/true));
  EXPECT_FALSE(buffer.room().zeros());
  ExpectHolds(&buffer, Numbers(2000));
}

TEST_P(TieredBufferTest, ItStaysBelowWhereMemoryIsRefused) {
  TieredBuffer buffer = AllocateWith(Numbers(2000));
  {
    MemoryLedger& ledger = MemoryLedger::Host();
    const MemoryLimit limit(&ledger, ledger.total().current_bytes + 7999,
                            "a test");
    EXPECT_THAT(buffer.Raise(), StatusIs(absl::StatusCode::kResourceExhausted));
    EXPECT_FALSE(buffer.in_memory());
  }
  ExpectHolds(&buffer, Numbers(2000));
}

}  // namespace
}  // namespace tessera
