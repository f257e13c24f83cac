#include "sharding/partition/names.h"

#include <string>
#include <vector>

#include "base/status_matchers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

TEST(ClassNames, MatchesInFullOrByTheLastComponentWithAndWithoutImpl) {
  for (const char* wanted :
       {"torch::nn::LinearImpl", "torch::nn::Linear", "LinearImpl", "Linear"}) {
    ClassNames names("units", {wanted});
    EXPECT_TRUE(names.Match("torch::nn::LinearImpl")) << wanted;
    EXPECT_FALSE(names.Match("torch::nn::BilinearImpl")) << wanted;
    EXPECT_FALSE(names.Match("torch::nn::LinearImplicit")) << wanted;
  }
  EXPECT_TRUE(ClassNames("units", {"LinearImpl"}).Match("Linear"));
  EXPECT_FALSE(ClassNames("units", {"a::Linear"}).Match("b::Linear"));
  EXPECT_FALSE(ClassNames("units", {"Linear"}).Match("Linear::Options"));
  EXPECT_FALSE(ClassNames("units", {"Impl"}).Match("FooImpl"));
  EXPECT_TRUE(ClassNames("units", {"Impl"}).Match("Foo::Impl"));
}

TEST(ClassNames, LooksForTheLastComponentOutsideOfBrackets) {
  EXPECT_TRUE(ClassNames("units", {"Block"})
                  .Match("tessera::(anonymous namespace)::Block"));
  EXPECT_TRUE(ClassNames("units", {"Block"}).Match("Make(a::B)::Block"));
  EXPECT_TRUE(ClassNames("units", {"List<b::C>"}).Match("a::List<b::C>"));
  EXPECT_FALSE(ClassNames("units", {"C>"}).Match("a::List<b::C>"));
}

TEST(ClassNames, NamesWhatMatchedNothingAndTheNearestFirst) {
  ClassNames names("units", {"Linear", "Blok"});
  EXPECT_TRUE(names.Match("torch::nn::LinearImpl"));
  EXPECT_THAT(names.CheckMatched({"torch::nn::LinearImpl", "Tower", "Boot",
                                  "my::BlockImpl", "a::much::longer::Bloc"}),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       AllOf(HasSubstr("units: "), HasSubstr("'Blok'"),
                             HasSubstr("first: a::much::longer::Bloc, "
                                       "my::BlockImpl, Boot, "
                                       "Tower, torch::nn::LinearImpl"))));
  EXPECT_TRUE(names.Match("Blok"));
  EXPECT_TRUE(names.CheckMatched({}).ok());
}

TEST(PathPatterns, KnowsStarsAndQuestionMarks) {
  struct {
    const char* pattern;
    const char* path;
    bool matches;
  } cases[] = {
      {"a.b", "a.b", true},
      {"a.b", "a.b.c", false},
      {"a.b", "aXb", false},
      {"a.b", "a", false},
      {"*", "a.b", true},
      {"*", "", true},
      {"a.*", "a.b.c", true},
      {"a.*", "a", false},
      {"*.w", "a.b.w", true},
      {"*.w", "w", false},
      {"a.*.w", "a.b.c.w", true},
      {"a.*.w", "a.w", false},
      {"a*b*c", "a_b_b_c", true},
      {"a*b*c", "a_c_b", false},
      {"a**", "a", true},
      {"layers.?", "layers.1", true},
      {"layers.?", "layers.", false},
      {"layers.?", "layers.12", false},
      {"?*", "", false},
      {"*ab", "aab", true},
  };
  for (const auto& c : cases) {
    EXPECT_EQ(PathPatterns("ignored", {c.pattern}).Match(c.path), c.matches)
        << c.pattern << " " << c.path;
  }
}

TEST(PathPatterns, NamesWhatMatchedNothing) {
  PathPatterns patterns("ignored", {"a", "a*", "?", "b*"});
  EXPECT_TRUE(patterns.Match("a"));  // of all three
  EXPECT_THAT(
      patterns.CheckMatched({"an.example"}, true),
      StatusIs(absl::StatusCode::kInvalidArgument,
               AllOf(HasSubstr("ignored: 'b*'"), HasSubstr("'an.example'"))));
  EXPECT_TRUE(patterns.Match("bc"));
  EXPECT_TRUE(patterns.CheckMatched({}, true).ok());
}

TEST(DistinctNames, CountsThoseTakenBefore) {
  DistinctNames names;
  EXPECT_EQ(names.Take("a"), "a");
  EXPECT_EQ(names.Take("a (2)"), "a (2)");
  EXPECT_EQ(names.Take("a"), "a (3)");
  EXPECT_EQ(names.Take("a"), "a (4)");
  EXPECT_EQ(names.Take("b"), "b");
}

}  // namespace
}  // namespace tessera
