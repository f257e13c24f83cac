#include "base/thread/start_thread.h"

#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <memory>
#include <string>
#include <utility>

#include "base/status_matchers.h"
#include "base/thread/no_threads_test_util.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

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
                             HasSubstr("no room for its stack of "),
                             Not(HasSubstr("ulimit -u")))));
  EXPECT_TRUE(seen.expired());
}

// Returns StartThread's error in a process with this limit.
std::string SaidUnder(decltype(RLIMIT_AS) which, rlim_t limit) {
  int ends[2];
  EXPECT_EQ(pipe(ends), 0);
  const pid_t pid = fork();
  if (pid == 0) {
    const rlimit both = {limit, limit};
    if (setrlimit(which, &both) != 0) _exit(1);
    const absl::Status status = thread_internal::NoThread("a", "why");
    const std::string text(status.message());
    _exit(write(ends[1], text.data(), text.size()) < 0 ? 2 : 0);
  }
  close(ends[1]);
  int status = 0;
  EXPECT_EQ(waitpid(pid, &status, 0), pid);
  EXPECT_EQ(status, 0);
  std::string text(1000, 0);
  const ssize_t got = read(ends[0], text.data(), text.size());
  text.resize(got > 0 ? static_cast<size_t>(got) : 0);
  close(ends[0]);
  return text;
}

TEST(StartThreadTest, TheLimitThatIsInTheWayIsNamed) {
  EXPECT_THAT(SaidUnder(RLIMIT_NPROC, 1234),
              AllOf(HasSubstr("(a): why; raise the limit of processes (ulimit "
                              "-u, now 1234, or pids.max"),
                    Not(HasSubstr("address space"))));
#if !__has_feature(address_sanitizer) && !__has_feature(thread_sanitizer)
  EXPECT_THAT(SaidUnder(RLIMIT_AS, 4 << 20),
              AllOf(HasSubstr("no room for its stack"),
                    HasSubstr("address space is limited to 4 MiB; raise the "
                              "limit (ulimit -v)"),
                    Not(HasSubstr("limit of processes"))));
#endif
}

}  // namespace
}  // namespace tessera
