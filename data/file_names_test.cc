#include "data/file_names.h"

#include "base/status_matchers.h"
#include "data/test_files.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tessera {
namespace {

using ::absl::StatusCode;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::SizeIs;

TEST(ExpandBraces, RangesListsAndPlainNames) {
  EXPECT_THAT(ExpandBraces("a.tar"), IsOkAndHolds(ElementsAre("a.tar")));
  EXPECT_THAT(ExpandBraces("s-{08..11}.tar"),
              IsOkAndHolds(
                  ElementsAre("s-08.tar", "s-09.tar", "s-10.tar", "s-11.tar")));
  EXPECT_THAT(ExpandBraces("s-{8..11}"),
              IsOkAndHolds(ElementsAre("s-8", "s-9", "s-10", "s-11")));
  EXPECT_THAT(ExpandBraces("{train,val,}.bin"),
              IsOkAndHolds(ElementsAre("train.bin", "val.bin", ".bin")));
  EXPECT_THAT(ExpandBraces("{a,b}-{0..1}"),
              IsOkAndHolds(ElementsAre("a-0", "a-1", "b-0", "b-1")));
  EXPECT_THAT(ExpandBraces("{000..099}.tar"), IsOkAndHolds(SizeIs(100)));
  EXPECT_THAT(ExpandBraces("{5..5}"), IsOkAndHolds(ElementsAre("5")));
}

TEST(ExpandBraces, BracesThatAreNoListStay) {
  EXPECT_THAT(ExpandBraces("a{b}c{}"), IsOkAndHolds(ElementsAre("a{b}c{}")));
  EXPECT_THAT(ExpandBraces("{a..c}"), IsOkAndHolds(ElementsAre("{a..c}")));
}

TEST(ExpandBraces, WhatCannotBeIsRefused) {
  EXPECT_THAT(ExpandBraces("s-{0..9"),
              StatusIs(StatusCode::kInvalidArgument,
                       "s-{0..9: the { at character 2 is not closed"));
  EXPECT_THAT(ExpandBraces("{3..1}"),
              StatusIs(StatusCode::kInvalidArgument, HasSubstr("got {3..1}")));
  EXPECT_THAT(ExpandBraces("{0..999999999999}"),
              StatusIs(StatusCode::kInvalidArgument, HasSubstr("1000000")));
  EXPECT_THAT(ExpandBraces("{0..9999}{0..9999}"),
              StatusIs(StatusCode::kInvalidArgument,
                       HasSubstr("more than 1000000 files")));
}

TEST(MatchFiles, SortsWhatGlobFinds) {
  const std::string folder = TestFolder("d");
  for (const char* name : {"/b.bin", "/a.bin", "/B.bin", "/c.txt"}) {
    WriteBytes(folder + name, "x");
  }
  EXPECT_THAT(MatchFiles(folder + "/*.bin"),
              IsOkAndHolds(ElementsAre(folder + "/B.bin", folder + "/a.bin",
                                       folder + "/b.bin")));
  EXPECT_THAT(MatchFiles(folder + "/{c.*,[ab].bin}"),
              IsOkAndHolds(ElementsAre(folder + "/c.txt", folder + "/a.bin",
                                       folder + "/b.bin")));
  EXPECT_THAT(MatchFiles(folder + "/none"),
              IsOkAndHolds(ElementsAre(folder + "/none")));
  EXPECT_THAT(
      MatchFiles(folder + "/*.tar"),
      StatusIs(StatusCode::kNotFound, folder + "/*.tar: matches no file"));
}

}  // namespace
}  // namespace tessera
