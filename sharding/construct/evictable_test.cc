// Memory of a storage that is taken away and comes back.
#include "sharding/construct/evictable.h"

#include <sys/mman.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ATen/core/Tensor.h"
#include "ATen/ops/from_blob.h"
#include "base/memory/memory.h"
#include "base/status_matchers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "sharding/construct/construction.h"

namespace tessera {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kBytes = 10000;

int64_t Working() {
  return MemoryLedger::Host().Report()[MemoryKind::kWorking].current_bytes;
}

c10::intrusive_ptr<c10::StorageImpl> MakeStorage() {
  auto memory = Evictable::Allocate(kBytes, kBytes,
                                    std::make_shared<Construction>(nullptr, 1));
  TESSERA_EXPECT_OK(memory.status());
  return c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), kBytes, *std::move(memory),
      /*allocator=*/nullptr, /*resizable=*/false);
}

TEST(EvictableTest, ComesBackAtTheSameAddress) {
  auto storage = MakeStorage();
  Evictable* const memory = Evictable::Of(storage.get());
  ASSERT_NE(memory, nullptr);
  EXPECT_EQ(Working(), kBytes);
  char* const data = static_cast<char*>(storage->mutable_data());
  data[kBytes - 1] = 7;
  TESSERA_EXPECT_OK(memory->Take(storage.get(), "it is gone"));
  EXPECT_EQ(Working(), 0);
  EXPECT_FALSE(memory->whole());
  try {
    (void)storage->data();
    ADD_FAILURE() << "no error";
  } catch (const std::exception& e) {
    EXPECT_THAT(e.what(), HasSubstr("it is gone"));
  }
  TESSERA_EXPECT_OK(memory->Return());
  memory->Show(storage.get());
  EXPECT_EQ(Working(), kBytes);
  EXPECT_EQ(storage->data(), data);
  EXPECT_EQ(data[kBytes - 1], 0);
  storage = nullptr;
  EXPECT_EQ(Working(), 0);
}

TEST(EvictableTest, ATakenStorageMayDie) {
  auto storage = MakeStorage();
  TESSERA_EXPECT_OK(
      Evictable::Of(storage.get())->Take(storage.get(), "it is gone"));
  storage = nullptr;
  EXPECT_EQ(Working(), 0);
}

TEST(EvictableTest, ReturnIsRefusedByTheLimit) {
  auto storage = MakeStorage();
  Evictable* const memory = Evictable::Of(storage.get());
  TESSERA_EXPECT_OK(memory->Take(storage.get(), "it is gone"));
  MemoryLedger::Host().SetLimit(kBytes - 1);
  EXPECT_THAT(memory->Return().message(), HasSubstr("the limit is 9999"));
  MemoryLedger::Host().SetLimit(MemoryLedger::kNoLimit);
  EXPECT_FALSE(memory->whole());
}

// While it lives the process has as many mappings as the system allows.
class NoMoreMappings {
 public:
  NoMoreMappings() {
    // Every other page with another access is a mapping of its own.
    for (int64_t i = 0; i < kPages; i += 2) {
      if (mprotect(pages_ + i * kPage, kPage, PROT_READ) != 0) break;
    }
    // One of these may go beyond the limit.
    for (void*& one : more_) {
      one = mmap(nullptr, kPage, PROT_EXEC, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    }
  }
  ~NoMoreMappings() {
    for (void* one : more_) {
      if (one != MAP_FAILED) munmap(one, kPage);
    }
    munmap(pages_, kBytesOfAll);
  }
  bool reached() const { return more_[1] == MAP_FAILED; }

 private:
  static constexpr int64_t kPage = 4096, kPages = 140000;
  static constexpr int64_t kBytesOfAll = kPages * kPage;
  char* const pages_ = static_cast<char*>(
      mmap(nullptr, kBytesOfAll, PROT_NONE,
           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  void* more_[2];
};

// Storages that follow each other in memory are one mapping while all of them
// are there, or away: for one alone it has to become two.
TEST(EvictableTest, TheLimitOfMappingsIsAnError) {
#if __has_feature(address_sanitizer)
  GTEST_SKIP() << "the sanitizer maps memory of its own";
#endif
  std::vector<c10::intrusive_ptr<c10::StorageImpl>> storages;
  for (int i = 0; i < 3; ++i) storages.push_back(MakeStorage());
  auto& middle = storages[1];
  Evictable* const memory = Evictable::Of(middle.get());
  {
    const NoMoreMappings full;
    if (!full.reached()) GTEST_SKIP() << "vm.max_map_count is too large";
    EXPECT_THAT(memory->Take(middle.get(), "it is gone"),
                StatusIs(absl::StatusCode::kResourceExhausted,
                         HasSubstr("vm.max_map_count")));
  }
  EXPECT_FALSE(memory->whole());
  EXPECT_THROW((void)middle->data(), c10::Error);
  TESSERA_EXPECT_OK(memory->Return());
  memory->Show(middle.get());
  EXPECT_EQ(static_cast<const char*>(middle->data())[kBytes - 1], 0);
  for (auto& each : storages) {
    TESSERA_EXPECT_OK(Evictable::Of(each.get())->Take(each.get(), "gone"));
  }
  {
    const NoMoreMappings full;
    EXPECT_THAT(memory->Return(), StatusIs(absl::StatusCode::kResourceExhausted,
                                           HasSubstr("vm.max_map_count")));
    EXPECT_FALSE(memory->whole());
    middle = nullptr;
  }
  EXPECT_EQ(Working(), 0);
}

TEST(EvictableTest, RetiredMemoryIsPlain) {
  auto storage = MakeStorage();
  Evictable* const memory = Evictable::Of(storage.get());
  memory->Retire();
  EXPECT_EQ(Working(), 0);
  EXPECT_EQ(memory->owner(), nullptr);
  storage = nullptr;
  EXPECT_EQ(Working(), 0);
}

// What was a dangling pointer is a message.
TEST(EvictableDeathTest, APointerFromBeforeSaysWhatToDo) {
  auto storage = MakeStorage();
  volatile char* const data =
      static_cast<volatile char*>(storage->mutable_data());
  TESSERA_EXPECT_OK(
      Evictable::Of(storage.get())->Take(storage.get(), "[x] hold a Use"));
  EXPECT_DEATH(data[5] = 1, "\\[x\\] hold a Use");
  EXPECT_DEATH((void)data[kBytes - 1], "\\[x\\] hold a Use");
}

TEST(EvictableTest, OtherMemoryIsNotEvictable) {
  float value = 0;
  const at::Tensor plain = at::from_blob(&value, {1});
  EXPECT_EQ(Evictable::Of(plain.storage().unsafeGetStorageImpl()), nullptr);
  EXPECT_FALSE(IsEvictable(plain));
  EXPECT_FALSE(IsEvictable(at::Tensor()));
}

}  // namespace
}  // namespace tessera
