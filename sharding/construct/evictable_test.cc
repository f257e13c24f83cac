// Memory of a storage that is taken away and comes back.
#include "sharding/construct/evictable.h"

#include <memory>
#include <string>
#include <utility>

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
  return MemoryLedger::Global().Report()[MemoryKind::kWorking].current_bytes;
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
  memory->Take(storage.get(), "it is gone");
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
  Evictable::Of(storage.get())->Take(storage.get(), "it is gone");
  storage = nullptr;
  EXPECT_EQ(Working(), 0);
}

TEST(EvictableTest, ReturnIsRefusedByTheLimit) {
  auto storage = MakeStorage();
  Evictable* const memory = Evictable::Of(storage.get());
  memory->Take(storage.get(), "it is gone");
  MemoryLedger::Global().SetLimit(kBytes - 1);
  EXPECT_THAT(memory->Return().message(), HasSubstr("the limit is 9999"));
  MemoryLedger::Global().SetLimit(MemoryLedger::kNoLimit);
  EXPECT_FALSE(memory->whole());
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
  Evictable::Of(storage.get())->Take(storage.get(), "[x] hold a Use");
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
