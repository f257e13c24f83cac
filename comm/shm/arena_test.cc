#include "comm/shm/arena.h"

#include <fcntl.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <iterator>
#include <memory>

#include "base/memory/memfd.h"
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

// One over huge pages, of which there are not so many: where pages are not
// taken at once, the first write to such a buffer ends the process.
TEST(ArenaTest, PagesThatCannotBeHadAreRefused) {
  constexpr int64_t kBytes = int64_t{1} << 40;
  constexpr int64_t kWanted = int64_t{1} << 39;
  const auto make = [](bool takes_pages) {
    const int fd =
        memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING | MFD_HUGETLB);
    EXPECT_EQ(ftruncate(fd, kBytes), 0);
    EXPECT_EQ(fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL),
              0);
    return Arena::Over(fd, kBytes, takes_pages).value();
  };
  const std::unique_ptr<Arena> strict = make(true);
  for (int i = 0; i < 3; ++i) EXPECT_EQ(strict->Allocate(kWanted), nullptr);
  EXPECT_EQ(strict->resident_bytes(), 0);
  EXPECT_NE(make(false)->Allocate(kWanted), nullptr);
}

// They are there from the start, zero again after use, and go back.
TEST(ArenaTest, TakesPagesAtOnceWhereItIsToldTo) {
  constexpr int64_t kBytes = 1 << 20;
  for (const bool takes_pages : {false, true}) {
    const int fd = MakeSparseMemfd("test", kBytes).value();
    const std::unique_ptr<Arena> arena =
        Arena::Over(fd, kBytes, takes_pages).value();
    for (int i = 0; i < 2; ++i) {
      char* const data = static_cast<char*>(arena->Allocate(kBytes / 2));
      EXPECT_EQ(arena->resident_bytes(), takes_pages ? kBytes / 2 : 0);
      EXPECT_EQ(data[5000], 0);
      data[5000] = 1;
      arena->Free(data, kBytes / 2);
      EXPECT_EQ(arena->resident_bytes(), 0);
    }
  }
}

}  // namespace
}  // namespace tessera::shm
