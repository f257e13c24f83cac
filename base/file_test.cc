#include "base/file.h"

#include <errno.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <fstream>
#include <string>

#include "absl/strings/str_cat.h"
#include "base/status_matchers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tessera {
namespace {

std::string WriteFile(const std::string& name, const std::string& content) {
  const std::string path = absl::StrCat(::testing::TempDir(), name);
  std::ofstream(path, std::ios::binary) << content;
  return path;
}

TEST(ReadWholeFile, ReadsAllSizes) {
  for (const size_t bytes : {0, 1, 16383, 16384, 16385, 100000}) {
    std::string content(bytes, 'a');
    if (bytes > 2) content[bytes / 2] = '\0';
    EXPECT_THAT(ReadWholeFile(WriteFile("whole", content)),
                IsOkAndHolds(content));
  }
}

TEST(ReadWholeFile, ReadsProc) {
  EXPECT_THAT(ReadWholeFile("/proc/self/stat"),
              IsOkAndHolds(::testing::Not(::testing::IsEmpty())));
}

TEST(ReadWholeFile, MissingIsNotFoundWithThePath) {
  EXPECT_THAT(ReadWholeFile("/nowhere/zero3.json"),
              StatusIs(absl::StatusCode::kNotFound,
                       "/nowhere/zero3.json: No such file or directory"));
}

TEST(ReadWholeFile, FolderIsAnError) {
  EXPECT_THAT(ReadWholeFile(::testing::TempDir()), ::testing::Not(IsOk()));
}

TEST(ReadWholeFile, LimitIsInclusive) {
  const std::string path = WriteFile("limit", "12345");
  EXPECT_THAT(ReadWholeFile(path, 5), IsOkAndHolds("12345"));
  EXPECT_THAT(ReadWholeFile(path, 4),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       absl::StrCat(path, ": more than 4 bytes")));
}

TEST(ReadRegularFile, FollowsLinksAndWaitsForNoPipe) {
  const std::string path = WriteFile("regular", "12345");
  const std::string link = path + ".link", pipe = path + ".pipe";
  unlink(link.c_str());
  ASSERT_EQ(symlink(path.c_str(), link.c_str()), 0);
  EXPECT_THAT(ReadRegularFile(link, 5), IsOkAndHolds("12345"));
  unlink(pipe.c_str());
  ASSERT_EQ(mkfifo(pipe.c_str(), 0600), 0);
  alarm(20);  // it would wait for ever
  EXPECT_THAT(ReadRegularFile(pipe, 5),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       absl::StrCat(pipe,
                                    ": expected a file, got a folder, a "
                                    "pipe or a device")));
  alarm(0);
}

TEST(PiecesOfAFile, AreWrittenAndReadWhereTheyLie) {
  FILE* const file = std::tmpfile();
  ASSERT_NE(file, nullptr);
  const int fd = fileno(file);
  TESSERA_EXPECT_OK(WriteAt(fd, "f", 3, "defgh", 5));
  TESSERA_EXPECT_OK(WriteAt(fd, "f", 0, "abc", 3));
  char text[8] = {};
  TESSERA_EXPECT_OK(ReadAt(fd, "f", 2, text, 4));
  EXPECT_STREQ(text, "cdef");
  EXPECT_THAT(
      ReadAt(fd, "f", 6, text, 5),
      StatusIs(absl::StatusCode::kDataLoss,
               ::testing::HasSubstr("ends at byte 8, expected 3 more")));
  std::fclose(file);
  EXPECT_THAT(
      WriteAt(-1, "f", 0, "a", 1),
      StatusIs(absl::ErrnoToStatusCode(EBADF), ::testing::StartsWith("f: ")));
}

TEST(SyncFolderOf, NamesTheFolderThatIsMissing) {
  TESSERA_EXPECT_OK(SyncFolderOf(WriteFile("synced", "")));
  EXPECT_THAT(SyncFolderOf("/nowhere/at/all"),
              StatusIs(absl::StatusCode::kNotFound,
                       ::testing::HasSubstr("/nowhere/at: ")));
}

TEST(FileError, CodeFollowsErrno) {
  EXPECT_THAT(
      FileError(EACCES, "/a"),
      StatusIs(absl::StatusCode::kPermissionDenied, "/a: Permission denied"));
}

}  // namespace
}  // namespace tessera
