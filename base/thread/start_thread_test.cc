#include "base/thread/start_thread.h"

#include <memory>
#include <string>
#include <utility>

#include "base/status_matchers.h"
#include "base/thread/no_threads.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

TEST(StartThreadTest, RunsMoveOnlyWorkUnderItsName) {
  std::string name;
  auto thread =
      StartThread("tessera-test", [&, number = std::make_unique<int>(7)] {
        char text[16];
        pthread_getname_np(pthread_self(), text, sizeof(text));
        name = text + std::to_string(*number);
      });
  TESSERA_ASSERT_OK(thread.status());
  thread->join();
  EXPECT_EQ(name, "tessera-test7");
}

TEST(StartThreadTest, ASystemWithoutThreadsIsAnError) {
  const NoThreads none;
  auto owned = std::make_shared<int>(7);
  const std::weak_ptr<int> seen = owned;
  const auto thread =
      StartThread("tessera-test", [owned = std::move(owned)] { FAIL(); });
  EXPECT_THAT(thread.status(),
              StatusIs(absl::StatusCode::kResourceExhausted,
                       AllOf(HasSubstr("cannot start a thread (tessera-test)"),
                             HasSubstr("ulimit -u"))));
  EXPECT_TRUE(seen.expired());
}

}  // namespace
}  // namespace tessera
