// For tests of UpdateStream: units of states on a disk, which a stream changes,
// and what the same makes of them in memory.
#ifndef OFFLOAD_UPDATE_STREAM_TEST_UTIL_H_
#define OFFLOAD_UPDATE_STREAM_TEST_UTIL_H_

#include <errno.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/layout/layout.h"
#include "base/status_matchers.h"
#include "comm/communicator.h"
#include "gtest/gtest.h"
#include "offload/disk/swap_file.h"
#include "offload/disk/swap_test_util.h"
#include "offload/tiered_buffer.h"
#include "offload/update_stream.h"

namespace tessera {

inline constexpr int64_t kSlice = 4096;

template <typename T>
void ChangeElements(Range slice, int by, char* data) {
  T* const values = reinterpret_cast<T*>(data);
  for (int64_t i = 0; i < slice.numel(); ++i) {
    values[i] = values[i] * T{0.75} + static_cast<T>(slice.begin + i + by) / 3;
  }
}

// What a round does to elements of state `index`, wherever it is cut.
inline void Change(at::ScalarType dtype, Range slice, size_t index, int round,
                   char* data) {
  const int by = 10 * round + static_cast<int>(index);
  dtype == at::kFloat ? ChangeElements<float>(slice, by, data)
                      : ChangeElements<double>(slice, by, data);
}

// A unit's states on the disk, and what the same rounds make of them in memory.
struct TestUnit {
  int64_t numel = 0;
  std::vector<TieredBuffer> states;
  std::vector<std::vector<char>> want;
  std::vector<Range> slices;  // that compute has been called with

  void ChangeInMemory(int round) {
    for (size_t i = 0; i < states.size(); ++i) {
      Change(states[i].dtype(), {0, numel}, i, round, want[i].data());
    }
  }
  void ExpectAsInMemory() const {
    for (size_t i = 0; i < states.size(); ++i) {
      std::vector<char> got(want[i].size());
      TESSERA_EXPECT_OK(states[i].ReadBytes(0, states[i].bytes(), got.data()));
      EXPECT_TRUE(got == want[i]) << states[i].what();
    }
  }
  // From the first element to the last, once.
  void ExpectAllSlices() {
    int64_t at = 0;
    for (const Range slice : slices) {
      EXPECT_EQ(slice.begin, at);
      EXPECT_EQ(slice.end, std::min(at + kSlice, numel));
      at = slice.end;
    }
    EXPECT_EQ(at, numel);
    slices.clear();
  }
};

// By uring or threads (swap_test_util.h).
class UpdateStreamTest : public SwapFileTest {
 protected:
  void MakeStream(int buffers = 4) {
    if (file_ == nullptr) file_ = Open();
    UpdateStreamOptions options;
    options.buffers = buffers;
    options.slice_numel = kSlice;
    options.most_states = 4;
    options.item_bytes = 8;
    TESSERA_ASSERT_OK_AND_ASSIGN(stream_, UpdateStream::Create(file_, options));
  }
  TestUnit* AddUnit(int64_t numel, std::vector<at::ScalarType> dtypes) {
    auto unit = std::make_unique<TestUnit>();
    unit->numel = numel;
    for (const at::ScalarType dtype : dtypes) {
      auto state = TieredBuffer::Allocate(
          numel, dtype, at::kCPU, MemoryKind::kOptimizer, {Tier::kDisk, file_},
          absl::StrCat("state ", unit->states.size(), " of unit ",
                       units_.size()));
      TESSERA_EXPECT_OK(state);
      unit->want.emplace_back(static_cast<size_t>(state->bytes()));
      unit->states.push_back(*std::move(state));
    }
    units_.push_back(std::move(unit));
    return units_.back().get();
  }
  TestUnit* AddUnit(int64_t numel) {
    return AddUnit(numel, {at::kFloat, at::kFloat});
  }
  // `before`: of each slice.
  using Before = std::function<absl::Status(Range slice)>;
  CommFuture Push(TestUnit* unit, int round = 0, Before before = nullptr) {
    const UpdateStream::Pushed pushed =
        stream_->Push(UpdateOf(unit, round, std::move(before)));
    written_ = pushed.written;
    return pushed.computed;
  }
  UpdateStream::Early PushEarly(TestUnit* unit, int round = 0,
                                Before before = nullptr) {
    for (TieredBuffer& state : unit->states) {
      TESSERA_EXPECT_OK(state.MakeRoomForNext());
    }
    return stream_->PushEarly(UpdateOf(unit, round, std::move(before)));
  }
  // What was pushed so far has been computed.
  void AwaitComputed() { TESSERA_EXPECT_OK(Push(AddUnit(1)).Wait()); }
  StreamedUpdate UpdateOf(TestUnit* unit, int round, Before before) {
    StreamedUpdate update;
    update.numel = unit->numel;
    for (TieredBuffer& state : unit->states) {
      const auto number = static_cast<int>(update.states.size());
      update.states.push_back({&state, number < num_read_, true});
    }
    update.compute = [unit, round, before = std::move(before)](
                         Range slice,
                         const std::vector<char*>& data) -> absl::Status {
      unit->slices.push_back(slice);
      if (before) TESSERA_RETURN_IF_ERROR(before(slice));
      for (size_t i = 0; i < unit->states.size(); ++i) {
        Change(unit->states[i].dtype(), slice, i, round, data[i]);
      }
      return absl::OkStatus();
    };
    return update;
  }
  // Requests of that kind fail from now on that touch byte `at` of the extent.
  void Fail(bool writes, const TieredBuffer& state, int64_t at) {
    const int64_t first = state.room().extent().begin + at / kBlock * kBlock;
    system_.answer = [=](bool write, int64_t offset, int64_t result) {
      return write == writes && offset == first ? -EIO : result;
    };
  }
  // After `error`: everything returns it, and nothing is computed.
  template <typename Matcher>
  void ExpectStaysFailed(const Matcher& error) {
    EXPECT_THAT(stream_->Drain(), error);
    TestUnit* const more = AddUnit(2 * kSlice);
    TestUnit* const nothing = AddUnit(0);
    EXPECT_THAT(Push(more).Wait(), error);
    EXPECT_THAT(Push(nothing).Wait(), error);
    EXPECT_THAT(stream_->Drain(), error);
    EXPECT_TRUE(more->slices.empty());
    EXPECT_TRUE(more->states[0].room().zeros());
  }

  std::shared_ptr<SwapFile> file_;
  int num_read_ = 99;   // of Push: the first states
  CommFuture written_;  // of the last Push
  std::vector<std::unique_ptr<TestUnit>> units_;
  std::unique_ptr<UpdateStream> stream_;
};

}  // namespace tessera
#endif  // OFFLOAD_UPDATE_STREAM_TEST_UTIL_H_
