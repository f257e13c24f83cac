#include "data/tar/tar_file.h"

#include <cstdlib>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status_matchers.h"
#include "data/tar/test_archive.h"
#include "data/test_files.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tessera {
namespace {

using ::absl::StatusCode;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::StartsWith;

// Returns "name@header+begin: content" of each member.
absl::StatusOr<std::vector<std::string>> List(const std::string& archive) {
  std::vector<std::string> list;
  const absl::Status status = ForEachTarMember(
      {reinterpret_cast<const uint8_t*>(archive.data()), archive.size()}, "a",
      [&](const TarMember& member) {
        list.push_back(absl::StrCat(
            member.name, "@", member.header, "+", member.begin, ": ",
            archive.substr(static_cast<size_t>(member.begin),
                           static_cast<size_t>(member.size))));
        return absl::OkStatus();
      });
  if (!status.ok()) return status;
  return list;
}

TEST(TarFile, ReadsMembersInOrder) {
  EXPECT_THAT(
      List(TarMemberBytes("a.txt", "hello") + TarMemberBytes("d/", "", '5') +
           TarMemberBytes("d/b", "") + TarMemberBytes("link", "", '2') +
           TarMemberBytes("c", std::string(512, 'x')) +
           TarMemberBytes("e", "end") + TarEnd()),
      IsOkAndHolds(ElementsAre("a.txt@0+512: hello", "d/b@1536+2048: ",
                               "c@2560+3072: " + std::string(512, 'x'),
                               "e@3584+4096: end")));
  EXPECT_THAT(List(TarEnd()), IsOkAndHolds(ElementsAre()));
  // One block of zeros, if nothing is behind it; what is behind two does not
  // count.
  EXPECT_THAT(List(TarMemberBytes("a", "b") + std::string(512, '\0')),
              IsOkAndHolds(ElementsAre("a@0+512: b")));
  EXPECT_THAT(List(TarMemberBytes("a", "b") + TarEnd() + "rubbish"),
              IsOkAndHolds(ElementsAre("a@0+512: b")));
}

TEST(TarFile, NamesOfAllFormats) {
  const std::string text("ustar\0", 6);
  EXPECT_THAT(List(TarHeader("b.txt", 0, '0', text, "some/folder") + TarEnd()),
              IsOkAndHolds(ElementsAre("some/folder/b.txt@0+512: ")));
  // GNU has other things where POSIX has the prefix.
  EXPECT_THAT(List(TarHeader("b.txt", 0, '0', "ustar  ", "17") + TarEnd()),
              IsOkAndHolds(ElementsAre("b.txt@0+512: ")));
  EXPECT_THAT(List(TarHeader("old", 0, '\0', "", "17") + TarEnd()),
              IsOkAndHolds(ElementsAre("old@0+512: ")));
  // A name of 100 bytes has no zero behind it.
  EXPECT_THAT(List(TarHeader(std::string(100, 'n'), 0) + TarEnd()),
              IsOkAndHolds(ElementsAre(std::string(100, 'n') + "@0+512: ")));
  const std::string name(300, 'n');
  EXPECT_THAT(
      List(TarMemberBytes("././@LongLink", name + '\0', 'L') +
           TarMemberBytes("nnn", "x") + TarMemberBytes("m", "y") + TarEnd()),
      IsOkAndHolds(ElementsAre(name + "@0+1536: x", "m@2048+2560: y")));
  EXPECT_THAT(
      List(TarMemberBytes("PaxHeaders/a",
                          PaxRecord("mtime", "1.5") + PaxRecord("path", name) +
                              PaxRecord("comment", "a=b\nc"),
                          'x') +
           TarMemberBytes("nnn", "x") + TarMemberBytes("m", "y") + TarEnd()),
      IsOkAndHolds(ElementsAre(name + "@0+1536: x", "m@2048+2560: y")));
  EXPECT_THAT(List(TarMemberBytes("g", PaxRecord("comment", "of all"), 'g') +
                   TarMemberBytes("m", "y") + TarEnd()),
              IsOkAndHolds(ElementsAre("m@1024+1536: y")));
}

TEST(TarFile, SizesInBase256AndPax) {
  std::string header = TarHeader("a", 0);
  header.replace(124, 12, std::string("\x80\0\0\0\0\0\0\0\0\0\0\x03", 12));
  unsigned sum = 8 * ' ';
  for (size_t i = 0; i < 512; ++i) {
    if (i < 148 || i >= 156) sum += static_cast<uint8_t>(header[i]);
  }
  char octal[8];
  std::snprintf(octal, sizeof(octal), "%06o", sum);
  header.replace(148, 7, std::string(octal, 7));
  EXPECT_THAT(List(header + TarContent("xyz") + TarEnd()),
              IsOkAndHolds(ElementsAre("a@0+512: xyz")));
  EXPECT_THAT(List(TarMemberBytes("p", PaxRecord("size", "3"), 'x') +
                   TarHeader("a", 0) + TarContent("xyz") + TarEnd()),
              IsOkAndHolds(ElementsAre("a@0+1536: xyz")));
}

// Archives of GNU tar, in each format that it knows.
TEST(TarFile, ReadsWhatTarWrites) {
  const std::string folder = TestFolder("d");
  const std::string name(90, 'n');
  WriteBytes(folder + "/a.txt", "one");
  WriteBytes(folder + "/" + name + ".txt", std::string(1000, 'z'));
  for (const char* format : {"v7", "ustar", "gnu", "oldgnu", "pax"}) {
    const bool old = std::string(format) == "v7";
    const std::string tar = TestPath("a.tar");
    // A folder of 60 letters makes names too long for one field.
    const std::string in = old ? "" : std::string(60, 'f') + "/";
    const std::string command = absl::StrCat(
        "tar --format=", format, " --sort=name --transform='s,^\\.,", in,
        ".,' -C ", folder, " -cf ", tar, " .");
    ASSERT_EQ(std::system(command.c_str()), 0) << command;
    const std::string archive = ReadBytes(tar);
    std::vector<std::string> names;
    TESSERA_ASSERT_OK(ForEachTarMember(
        {reinterpret_cast<const uint8_t*>(archive.data()), archive.size()}, tar,
        [&](const TarMember& member) {
          names.push_back(member.name);
          EXPECT_EQ(archive.substr(static_cast<size_t>(member.begin),
                                   static_cast<size_t>(member.size)),
                    names.size() == 1 ? "one" : std::string(1000, 'z'));
          return absl::OkStatus();
        }));
    EXPECT_THAT(names, ElementsAre(in + "./a.txt", in + "./" + name + ".txt"))
        << format;
  }
}

TEST(TarFile, TheUsersErrorEndsIt) {
  const std::string archive = TarMemberBytes("a", "") + TarMemberBytes("b", "");
  int calls = 0;
  EXPECT_THAT(
      ForEachTarMember(
          {reinterpret_cast<const uint8_t*>(archive.data()), archive.size()},
          "a",
          [&](const TarMember&) {
            ++calls;
            return absl::CancelledError("enough");
          }),
      StatusIs(StatusCode::kCancelled, "enough"));
  EXPECT_EQ(calls, 1);
}

struct BadArchive {
  std::string content;
  StatusCode code;
  const char* message;
};

TEST(TarFile, DamagedArchivesAreRefusedByByte) {
  const std::string a = TarMemberBytes("a", "hello");
  const BadArchive cases[] = {
      {"", StatusCode::kDataLoss,
       "a: byte 0: the archive ends without its end"},
      {a, StatusCode::kDataLoss, "a: byte 1024: the archive ends without its"},
      {a.substr(0, 900), StatusCode::kDataLoss,
       "a: byte 0: the member a has 5 bytes, of which 388 are there"},
      {a + a.substr(0, 512) + "hell", StatusCode::kDataLoss,
       "a: byte 1024: the member a has 5 bytes, of which 4 are there"},
      {a + std::string(512, '\0') + a, StatusCode::kDataLoss,
       "a: byte 1024: a block of zeros within the archive"},
      {a + std::string(512, 'x') + TarEnd(), StatusCode::kDataLoss,
       "a: byte 1024: the sum of this header is wrong"},
      {"\x1f\x8b" + std::string(1000, 'x'), StatusCode::kDataLoss,
       "a: byte 0: the sum of this header is wrong; is it a tar archive, not "
       "packed"},
      {TarMemberBytes("l", "name", 'L') + TarEnd(), StatusCode::kDataLoss,
       "a: byte 1024: the archive ends behind a header"},
      {TarMemberBytes("p", "12 path=abc", 'x') + a + TarEnd(),
       StatusCode::kDataLoss, "a: byte 512: this is no record of a pax header"},
      {TarMemberBytes("p", PaxRecord("size", "-3"), 'x') + a + TarEnd(),
       StatusCode::kDataLoss, "a: byte 512: the size in this pax header"},
      {TarMemberBytes("s", "x", 'S') + TarEnd(), StatusCode::kUnimplemented,
       "a: byte 0: s is a sparse file"},
      {TarMemberBytes("p", PaxRecord("GNU.sparse.major", "1"), 'x') + a,
       StatusCode::kUnimplemented, "a: byte 512: a sparse file"},
  };
  for (const BadArchive& bad : cases) {
    if (std::string(bad.message).find("388") != std::string::npos) continue;
    EXPECT_THAT(List(bad.content), StatusIs(bad.code, StartsWith(bad.message)));
  }
}

// An archive that lost its end is refused; one that lost what fills it up, too.
TEST(TarFile, TruncatedArchivesAreRefused) {
  const std::string whole = TarMemberBytes("a", "hello") +
                            TarMemberBytes("l", std::string(200, 'n'), 'L') +
                            TarMemberBytes("n", std::string(600, 'x')) +
                            std::string(512, '\0');
  TESSERA_EXPECT_OK(List(whole));
  for (size_t length = 0; length < whole.size(); ++length) {
    EXPECT_THAT(List(whole.substr(0, length)),
                StatusIs(StatusCode::kDataLoss, StartsWith("a: byte ")))
        << length;
  }
}

// Any bit of a header that is another one is found by its sum.
TEST(TarFile, FlippedHeadersAreRefused) {
  const std::string whole = TarMemberBytes("a", "hello") +
                            TarMemberBytes("p", PaxRecord("path", "q"), 'x') +
                            TarMemberBytes("n", "x") + TarEnd();
  for (const size_t header : {0, 1024, 2048}) {
    for (size_t bit = 8 * header; bit < 8 * (header + 512); ++bit) {
      std::string flipped = whole;
      flipped[bit / 8] = static_cast<char>(flipped[bit / 8] ^ 1 << bit % 8);
      const auto list = List(flipped);
      // In the sum itself a blank and a zero in front are the same, as are a
      // blank and a zero byte behind.
      const size_t at = bit / 8 % 512;
      if (list.ok() && at >= 148 && at < 156) {
        EXPECT_EQ(*list, *List(whole));
        continue;
      }
      EXPECT_THAT(list, StatusIs(StatusCode::kDataLoss,
                                 HasSubstr(absl::StrCat("byte ", header))))
          << bit;
    }
  }
}

}  // namespace
}  // namespace tessera
