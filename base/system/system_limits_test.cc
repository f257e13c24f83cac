#include "base/system/system_limits.h"

#include <errno.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <functional>
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

// Returns the result of `say` in a process with this limit.
std::string Under(decltype(RLIMIT_AS) which, rlim_t limit,
                  const std::function<std::string()>& say) {
  int ends[2];
  EXPECT_EQ(pipe(ends), 0);
  const pid_t pid = fork();
  if (pid == 0) {
    const rlimit both = {limit, limit};
    if (setrlimit(which, &both) != 0) _exit(1);
    const std::string text = say();
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

TEST(SystemLimitsTest, FilesThatMayBeOpen) {
  EXPECT_EQ(DescriptorLimit(EACCES), "");
  EXPECT_THAT(DescriptorLimit(ENFILE), HasSubstr("fs.file-max"));
  EXPECT_THAT(
      Under(RLIMIT_NOFILE, 16, [] { return DescriptorLimit(EMFILE); }),
      AllOf(HasSubstr("may have 16 files open"), HasSubstr("ulimit -n")));
}

}  // namespace
}  // namespace tessera
