#include "comm/shm/arena.h"

#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/syscall.h>

#include <cerrno>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <iterator>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tessera::shm {
namespace {

using ::testing::ExitedWithCode;

// As a kernel that knows nothing of holes: fallocate fails from here on.
bool RefuseFallocate() {
  sock_filter code[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_fallocate, 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EOPNOTSUPP),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  const sock_fprog program = {std::size(code), code};
  return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 &&
         prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0;
}

// In a process of its own: an arena is made once.
TEST(ArenaTest, IsNotMadeWhereFreedPagesCannotBeGivenBack) {
  const auto make = [] {
    if (!RefuseFallocate()) std::exit(2);
    const absl::StatusOr<Arena*> arena = Arena::Get();
    std::fprintf(stderr, "%s\n", arena.status().ToString().c_str());
    std::exit(arena.ok() ? 1 : 0);
  };
  EXPECT_EXIT(make(), ExitedWithCode(0),
              "UNAVAILABLE: shared memory: fallocate: .*not supported");
}

}  // namespace
}  // namespace tessera::shm
