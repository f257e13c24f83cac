// Tests what malloc does with freed blocks in a training (base/memory/heap.h).
#include <malloc.h>
#include <torch/torch.h>

#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "gtest/gtest.h"
#include "tests/support/rank_pool.h"
#include "tests/support/training.h"

namespace tessera {
namespace {

// Whether a block of 4 MiB is mapped by itself, to be unmapped when it is
// freed.
bool IsMapped() {
  constexpr size_t kBytes = 4 << 20;
  const size_t before = mallinfo2().hblks;
  void* volatile block = std::malloc(kBytes);  // the compiler cannot omit it
  std::memset(block, 1, kBytes);
  const size_t with = mallinfo2().hblks;
  std::free(block);
  return with > before;
}

// Looks after Create, and after each of three steps.
TESSERA_RANK_FUNCTION(AreBlocksMapped) {
  const TrainingSpec spec = TrainingSpec::FromText(args);
  // glibc keeps blocks as large as one that was freed.
  IsMapped();
  auto model = std::make_shared<torch::nn::LinearImpl>(64, 64);
  TESSERA_ASSIGN_OR_RETURN(auto engine,
                           MakeEngine(model, spec, world.communicator()));
  std::string answers = absl::StrCat(IsMapped());
  for (int step = 0; step < 3; ++step) {
    const at::Tensor loss = model->forward(torch::ones({4, 64})).sum();
    TESSERA_RETURN_IF_ERROR(engine->Backward(loss));
    TESSERA_RETURN_IF_ERROR(engine->Step());
    absl::StrAppend(&answers, IsMapped());
  }
  TESSERA_RETURN_IF_ERROR(engine->Close());
  return answers;
}

TEST(HeapUseTest, WhatIsFreedStaysAfterTheSecondBackward) {
  // A process sets malloc once, so this one is not shared with other tests.
  RankPoolOptions alone;
  alone.world_size = 1;
  RankPool pool(alone);
  auto answers = pool.Run("AreBlocksMapped", TrainingSpec().ToText());
  ASSERT_TRUE(answers[0].ok()) << answers[0].status();
  EXPECT_EQ(*answers[0], "0100");
}

}  // namespace
}  // namespace tessera
