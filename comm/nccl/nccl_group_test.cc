#include "comm/nccl/nccl_group.h"

#include <dlfcn.h>

#include "base/status_matchers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "torch/csrc/distributed/c10d/Backend.hpp"
#include "torch/csrc/distributed/c10d/HashStore.hpp"

namespace tessera {
namespace {

using ::testing::HasSubstr;

bool Loaded(const char* library) {
  return dlopen(library, RTLD_LAZY | RTLD_NOLOAD) != nullptr;
}

// comm/nccl/gpu_test.cc makes groups where there is a GPU.
TEST(NewNcclGroup, WithoutADriverLoadsTheLibraryAndHearsItsError) {
  if (dlopen("libcuda.so.1", RTLD_LAZY) != nullptr) GTEST_SKIP() << "a driver";
  EXPECT_FALSE(Loaded("libtorch_cuda.so"));
  EXPECT_THAT(
      NewNcclGroup(c10::make_intrusive<c10d::HashStore>(), 0, 1),
      StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("no GPUs found")));
  EXPECT_TRUE(Loaded("libtorch_cuda.so"));
}

}  // namespace
}  // namespace tessera
