#include "base/status.h"

#include <memory>
#include <string>
#include <utility>

#include "absl/strings/cord.h"
#include "base/status_matchers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tessera {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::Pointee;

absl::Status Fails() { return absl::NotFoundError("no such unit"); }
absl::StatusOr<std::unique_ptr<int>> MakeInt(bool good) {
  if (!good) return absl::NotFoundError("no int");
  return std::make_unique<int>(7);
}
absl::StatusOr<std::pair<int, std::string>> MakePair() {
  return std::pair<int, std::string>(3, "three");
}

TEST(ReturnIfError, ReturnsTheError) {
  const auto run = []() -> absl::Status {
    TESSERA_RETURN_IF_ERROR(Fails());
    ADD_FAILURE() << "went on";
    return absl::OkStatus();
  };
  EXPECT_THAT(run(), StatusIs(absl::StatusCode::kNotFound, "no such unit"));
}

TEST(ReturnIfError, TakesAndReturnsStatusOr) {
  const auto run = [](bool good) -> absl::StatusOr<int> {
    TESSERA_RETURN_IF_ERROR(MakeInt(good));
    return 1;
  };
  EXPECT_THAT(run(true), IsOkAndHolds(1));
  EXPECT_THAT(run(false), StatusIs(absl::StatusCode::kNotFound));
}

TEST(ReturnIfError, EvaluatesOnceAndNestsInUnbracedIf) {
  int calls = 0;
  const auto run = [&](bool call) -> absl::Status {
    if (call)
      TESSERA_RETURN_IF_ERROR((++calls, absl::OkStatus()));
    else
      return absl::InternalError("else");
    return absl::OkStatus();
  };
  TESSERA_EXPECT_OK(run(true));
  EXPECT_EQ(calls, 1);
  EXPECT_THAT(run(false), StatusIs(absl::StatusCode::kInternal, "else"));
}

TEST(ReturnIfError, NestsInItsOwnExpression) {
  const auto run = []() -> absl::Status {
    TESSERA_RETURN_IF_ERROR([&]() -> absl::Status {
      TESSERA_RETURN_IF_ERROR(Fails());
      return absl::OkStatus();
    }());
    return absl::OkStatus();
  };
  EXPECT_THAT(run(), StatusIs(absl::StatusCode::kNotFound));
}

TEST(AssignOrReturn, MovesMoveOnlyValues) {
  const auto run = [](bool good) -> absl::StatusOr<int> {
    TESSERA_ASSIGN_OR_RETURN(std::unique_ptr<int> a, MakeInt(good));
    TESSERA_ASSIGN_OR_RETURN(const auto b, MakeInt(true));
    return *a + *b;
  };
  EXPECT_THAT(run(true), IsOkAndHolds(14));
  EXPECT_THAT(run(false), StatusIs(absl::StatusCode::kNotFound, "no int"));
}

TEST(AssignOrReturn, DeclaresStructuredBindingsAndAssigns) {
  const auto run = []() -> absl::StatusOr<std::string> {
    TESSERA_ASSIGN_OR_RETURN((const auto [number, word]), MakePair());
    std::pair<int, std::string> again;
    TESSERA_ASSIGN_OR_RETURN(again, MakePair());
    std::pair<int, std::string>* pointer = &again;
    TESSERA_ASSIGN_OR_RETURN(*pointer, MakePair());
    return word + std::to_string(number) + again.second;
  };
  EXPECT_THAT(run(), IsOkAndHolds("three3three"));
}

TEST(AssignOrReturn, TakesTemplateCommas) {
  const auto run = []() -> absl::StatusOr<int> {
    TESSERA_ASSIGN_OR_RETURN(
        auto pair, absl::StatusOr<std::pair<int, int>>(std::make_pair(1, 2)));
    return pair.second;
  };
  EXPECT_THAT(run(), IsOkAndHolds(2));
}

// dist/user/mistakes.cc has the messages.
TEST(StatusMacros, KnowFunctionsThatCannotReturnAStatus) {
  using status_internal::MayReturnStatus;
  EXPECT_FALSE(MayReturnStatus("int main(int, char **)"));  // clang's
  EXPECT_FALSE(MayReturnStatus("void tessera::F<int>()"));
  EXPECT_FALSE(MayReturnStatus("bool F()"));
  EXPECT_TRUE(MayReturnStatus("absl::Status Run(int, char **)"));
  EXPECT_TRUE(MayReturnStatus("integer F()"));
  EXPECT_TRUE(MayReturnStatus("Thing::Thing()"));
  EXPECT_TRUE(MayReturnStatus("main(int, char**)::<lambda()>"));  // gcc's
  EXPECT_TRUE(MayReturnStatus(""));
  EXPECT_TRUE(status_internal::kIsStatusOr<absl::StatusOr<int>>);
  EXPECT_FALSE(status_internal::kIsStatusOr<absl::Status>);
}

TEST(Annotate, PrefixesAndKeepsCodeAndPayload) {
  absl::Status status = absl::DataLossError("bad sum");
  status.SetPayload("url", absl::Cord("payload"));
  const absl::Status annotated = Annotate(status, "chunk 3");
  EXPECT_THAT(annotated,
              StatusIs(absl::StatusCode::kDataLoss, "chunk 3: bad sum"));
  EXPECT_EQ(annotated.GetPayload("url"), absl::Cord("payload"));
}

TEST(Annotate, LeavesOkAlone) {
  TESSERA_EXPECT_OK(Annotate(absl::OkStatus(), "x"));
}

TEST(StatusText, ComesBack) {
  for (const absl::Status& status :
       {absl::OkStatus(), absl::DataLossError("bad sum"),
        absl::InternalError(""),
        absl::UnknownError("two  words\nand a line")}) {
    EXPECT_EQ(StatusFromText(StatusToText(status)), status);
  }
  EXPECT_EQ(StatusToText(absl::OkStatus()), "");
  for (const char* text : {"13", "x 13", " ", "0 not OK", "-1 less"}) {
    EXPECT_THAT(StatusFromText(text),
                StatusIs(absl::StatusCode::kInternal, HasSubstr(text)));
  }
}

TEST(Matchers, StatusesArePrintedAsText) {
  EXPECT_EQ(testing::PrintToString(absl::StatusOr<int>(7)), "OK: 7");
  EXPECT_EQ(testing::PrintToString(
                absl::StatusOr<int>(absl::DataLossError("bad sum"))),
            "DATA_LOSS: bad sum");
}

TEST(Matchers, Distinguish) {
  EXPECT_THAT(Fails(), Not(IsOk()));
  EXPECT_THAT(MakeInt(false), Not(IsOk()));
  EXPECT_THAT(MakeInt(true), IsOk());
  EXPECT_THAT(MakeInt(true), IsOkAndHolds(Pointee(7)));
  EXPECT_THAT(MakeInt(true), Not(IsOkAndHolds(Pointee(8))));
  EXPECT_THAT(MakeInt(false), Not(IsOkAndHolds(Pointee(7))));
  EXPECT_THAT(Fails(), Not(StatusIs(absl::StatusCode::kInternal)));
  EXPECT_THAT(Fails(),
              Not(StatusIs(absl::StatusCode::kNotFound, HasSubstr("other"))));
}

TEST(Matchers, AssertAssigns) {
  TESSERA_ASSERT_OK_AND_ASSIGN(std::unique_ptr<int> value, MakeInt(true));
  EXPECT_EQ(*value, 7);
  TESSERA_ASSERT_OK_AND_ASSIGN((auto [number, word]), MakePair());
  EXPECT_EQ(number, 3);
  EXPECT_EQ(word, "three");
  TESSERA_ASSERT_OK(MakePair());
}

}  // namespace
}  // namespace tessera
