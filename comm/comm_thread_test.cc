#include "comm/comm_thread.h"

#include "base/status_matchers.h"
#include "base/thread/no_threads.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tessera {
namespace {

using ::testing::HasSubstr;

// And the next one tries again.
TEST(CommThreadTest, WithoutAThreadTheFutureIsAnError) {
  CommThread thread;
  bool ran = false;
  const CommThread::Work work = [&] {
    ran = true;
    return absl::OkStatus();
  };
  {
    const NoThreads none;
    EXPECT_THAT(thread.Post(work).Wait(),
                StatusIs(absl::StatusCode::kResourceExhausted,
                         HasSubstr("tessera-comm")));
  }
  EXPECT_FALSE(ran);
  TESSERA_EXPECT_OK(thread.Post(work).Wait());
  EXPECT_TRUE(ran);
  thread.Stop();
}

}  // namespace
}  // namespace tessera
