#include "config/reader/json_reader.h"

#include <cmath>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status_matchers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tessera {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

JsonValue Read(absl::string_view text) {
  absl::StatusOr<JsonValue> value = ReadJson(text, "f.json");
  TESSERA_EXPECT_OK(value) << text;
  return value.ok() ? *std::move(value) : JsonValue();
}

// The value as JSON without blanks, to compare trees in one line.
std::string Print(const JsonValue& value) {
  std::string out;
  switch (value.kind) {
    case JsonKind::kNull:
      return "null";
    case JsonKind::kBool:
      return value.boolean ? "true" : "false";
    case JsonKind::kNumber:
      return value.text;
    case JsonKind::kString:
      return absl::StrCat("\"", value.text, "\"");
    case JsonKind::kArray:
      for (const JsonValue& element : value.elements) {
        absl::StrAppend(&out, out.empty() ? "" : ",", Print(element));
      }
      return absl::StrCat("[", out, "]");
    case JsonKind::kObject:
      for (const JsonMember& member : value.members) {
        absl::StrAppend(&out, out.empty() ? "" : ",", "\"", member.key,
                        "\":", Print(member.value));
      }
      return absl::StrCat("{", out, "}");
  }
  return out;
}

struct Case {
  std::string text;
  std::string expected;
};

TEST(ReadJson, Trees) {
  const Case cases[] = {
      {"null", "null"},
      {" true ", "true"},
      {"false", "false"},
      {"-0", "-0"},
      {"{}", "{}"},
      {"[ ]", "[]"},
      {"[1, [2, {\"a\": [3]}], \"x\"]", "[1,[2,{\"a\":[3]}],\"x\"]"},
      {"{\"b\": 1,\r\n\t\"a\": 2}", "{\"b\":1,\"a\":2}"},
      {"{\"\": 0}", "{\"\":0}"},
      // DeepSpeed files in the wild have this.
      {"[1, 2,]", "[1,2]"},
      {"{\"a\": 1,}", "{\"a\":1}"},
      {"// first\n{\"a\": 1 // one\n, # two\n\"b\": /* x */ 2} # end",
       "{\"a\":1,\"b\":2}"},
      {"/**/[/*//*/1/***/]/* # */", "[1]"},
      {"\xEF\xBB\xBF[1]", "[1]"},
      {"\"http://a#b/*c*/\"", "\"http://a#b/*c*/\""},
  };
  for (const Case& c : cases) EXPECT_EQ(Print(Read(c.text)), c.expected);
}

TEST(ReadJson, Strings) {
  const Case cases[] = {
      {R"("a\"\\\/\b\f\n\r\tz")", "a\"\\/\b\f\n\r\tz"},
      {R"("\u0041\u00e9\u20AC")", "A\xC3\xA9\xE2\x82\xAC"},
      {R"("\ud83d\uDE00")", "\xF0\x9F\x98\x80"},
      {R"("\uD800\uDC00\uDBFF\uDFFF")", "\xF0\x90\x80\x80\xF4\x8F\xBF\xBF"},
      {"\"\xF0\x9F\x98\x80\x7F\"", "\xF0\x9F\x98\x80\x7F"},
  };
  for (const Case& c : cases) EXPECT_EQ(Read(c.text).text, c.expected);
  EXPECT_EQ(Read(R"("\u0000")").text, std::string(1, '\0'));
}

TEST(ReadJson, Numbers) {
  const std::pair<const char*, double> cases[] = {
      {"0", 0},
      {"-1.5", -1.5},
      {"1e3", 1000},
      {"1E+3", 1000},
      {"25e-2", .25},
      {"0e-400", 0},
      {"0.1", 0.1},
      {"5e-324", 5e-324},
      {"-0", 0},
      {"-0.0e9", 0},
      {"0.1000000000000000055511151231257827021181583404541015625000000001",
       0.1}};
  for (const auto& [text, expected] : cases) {
    EXPECT_EQ(Read(text).number, expected) << text;
    EXPECT_EQ(std::signbit(Read(text).number), expected < 0) << text;
  }
}

TEST(ReadJson, IntegersAreExactOrNotIntegers) {
  const std::pair<const char*, std::optional<int64_t>> cases[] = {
      {"0", 0},
      {"-7", -7},
      {"5e7", 50000000},
      {"5E+7", 50000000},
      {"2.0", 2},
      {"-1.5e1", -15},
      {"9007199254740993", 9007199254740993},  // 2^53 + 1
      {"9223372036854775807", INT64_MAX},
      {"-9223372036854775808", INT64_MIN},
      {"9223372036854775808", std::nullopt},
      {"9007199254740993.0", 9007199254740993},  // no double holds it
      {"1e18", 1000000000000000000},
      {"922337203685477580700e-2", INT64_MAX},
      {"-0.0", 0},
      {"0e999", 0},
      {"0e-99999999999999999999", 0},
      {"-0.0e-9223372036854775808", 0},
      {"1e19", std::nullopt},
      {"2.5", std::nullopt},
      {"1e-1", std::nullopt},
      {"true", std::nullopt},
      {"\"4\"", std::nullopt},
  };
  for (const auto& [text, expected] : cases) {
    EXPECT_EQ(Read(text).AsInt64(), expected) << text;
  }
}

TEST(ReadJson, PositionsCountLinesAndCharacters) {
  const JsonValue root = Read(
      "\xEF\xBB\xBF{ # c\n"
      "\t\"\xC3\xA9\": \"\xE2\x82\xAC\", \"b\":\r\n"
      "  [1,\n"
      "   /* \n */ 2]}");
  EXPECT_EQ(FormatPosition("f", root.position), "f:1:1");
  EXPECT_EQ(FormatPosition("f", root.members[0].key_position), "f:2:2");
  EXPECT_EQ(FormatPosition("f", root.members[0].value.position), "f:2:7");
  EXPECT_EQ(FormatPosition("f", root.members[1].key_position), "f:2:12");
  const JsonValue& array = *root.Find("b");
  EXPECT_EQ(FormatPosition("f", array.position), "f:3:3");
  EXPECT_EQ(FormatPosition("f", array.elements[0].position), "f:3:4");
  EXPECT_EQ(FormatPosition("f", array.elements[1].position), "f:5:5");
  EXPECT_EQ(root.Find("c"), nullptr);
}

TEST(ReadJson, FaultsNamePlaceAndCause) {
  const Case cases[] = {
      {"", "1:1: expected a value, got the end of the file"},
      {" # only a comment", "1:18: expected a value, got the end of the file"},
      {"{\n  \"a\": 1\n  \"b\": 2}", "3:3: expected ',' or '}', got '\"'"},
      {"[1 2]", "1:4: expected ',' or ']', got '2'"},
      {"[1", "1:3: expected ',' or ']', got the end of the file"},
      {"[,]", "1:2: expected a value, got ','"},
      {"[1,,]", "1:4: expected a value, got ','"},
      {"{,}", "1:2: expected a key in double quotes, got ','"},
      {"{\"a\" 1}", "1:6: expected ':' after the key 'a', got '1'"},
      {"{\"a\":}", "1:6: expected a value, got '}'"},
      {"{a: 1}", "1:2: expected a key in double quotes, got 'a'"},
      {"{'a': 1}", "1:2: expected a key in double quotes, got '''"},
      {"{1: 1}", "1:2: expected a key in double quotes, got '1'"},
      {"['a']", "1:2: expected a value, got '''"},
      {"[AdamW]",
       "1:2: expected a value, got AdamW; strings need double quotes"},
      {"True", "1:1: expected a value, got True; strings need double quotes"},
      {"NaN", "1:1: expected a value, got NaN: JSON has finite numbers alone"},
      {"[1, inf]",
       "1:5: expected a value, got inf: JSON has finite numbers alone"},
      {"-Infinity",
       "1:2: expected a value, got Infinity: JSON has finite numbers alone"},
      {"-x", "1:2: expected a digit, got 'x'"},
      {"-true", "1:2: expected a digit, got 't'"},
      {"nulls", "1:1: expected a value, got nulls; strings need double quotes"},
      {"[1] [2]", "1:5: expected the end of the file, got '['"},
      {"1 x", "1:3: expected the end of the file, got 'x'"},
      {"+1", "1:1: expected a value, got '+'"},
      {"01", "1:1: a number must not start with 0"},
      {"-01", "1:1: a number must not start with 0"},
      {"1.", "1:3: expected a digit, got the end of the file"},
      {".5", "1:1: expected a value, got '.'"},
      {"1e", "1:3: expected a digit, got the end of the file"},
      {"-", "1:2: expected a digit, got the end of the file"},
      {"1e999",
       "1:1: the number 1e999 is too large: a double is at most 1.8e308"},
      {"[0,\n -1.5E+400]",
       "2:2: the number -1.5E+400 is too large: a double is at most 1.8e308"},
      {"{\"a\": 1e-400}",
       "1:7: the number 1e-400 is too small: as a double it is 0; write 0 if "
       "that is meant"},
      {"-0.001e-330",
       "1:1: the number -0.001e-330 is too small: as a double it is 0; write 0 "
       "if that is meant"},
      {"1e-99999999999999999999",
       "1:1: the number 1e-99999999999999999999 is too small: as a double it "
       "is "
       "0; write 0 if that is meant"},
      {std::string(400, '9'),
       absl::StrCat("1:1: the number ", std::string(40, '9'),
                    "... is too large: a double is at most 1.8e308")},
      {"{\"a\": \"x}", "1:7: this string does not end"},
      {"[\"x\n\"]", "1:2: this string does not end on its line"},
      {"\"a\\x\"", "1:3: unknown escape: \\ before 'x'"},
      {"\"\\", "1:2: unknown escape: \\ before the end of the file"},
      {"\"\\u12g4\"", "1:6: expected four hex digits after \\u, got 'g'"},
      {"\"\\ud83d\"", "1:2: a high surrogate without its low one"},
      {"\"\\ud83d\\u0041\"", "1:2: a high surrogate without its low one"},
      {"\"\\ude00\"", "1:2: a low surrogate without its high one"},
      {"\"a\tb\"", "1:3: unexpected character 0x09 in a string"},
      {"\"\xC3\"", "1:2: unexpected byte 0xc3, not UTF-8 in a string"},
      {"\"\xC0\x80\"", "1:2: unexpected byte 0xc0, not UTF-8 in a string"},
      {"\"\xE0\x80\x80\"", "1:2: unexpected byte 0xe0, not UTF-8 in a string"},
      {"\"\xED\xA0\x80\"", "1:2: unexpected byte 0xed, not UTF-8 in a string"},
      {"\"\xF0\x80\x80\x80\"",
       "1:2: unexpected byte 0xf0, not UTF-8 in a string"},
      {"\"\xF4\x90\x80\x80\"",
       "1:2: unexpected byte 0xf4, not UTF-8 in a string"},
      {"\"\xF5\x80\x80\x80\"",
       "1:2: unexpected byte 0xf5, not UTF-8 in a string"},
      {"[1] # \xFF", "1:7: unexpected byte 0xff, not UTF-8"},
      {std::string("[\0]", 3), "1:2: expected a value, got character 0x00"},
      {"[1, /* x ]", "1:5: this comment does not end"},
      {"/*/", "1:1: this comment does not end"},
      {"/ 1", "1:1: expected a value, got '/'"},
      {"{\n \"a\": {\"b\": 1,\n  \"b\": 2}}",
       "3:3: duplicate key 'b', first at 2:8"},
      {"{\"a\": 1, \"\\u0061\": 2}", "1:10: duplicate key 'a', first at 1:2"},
  };
  for (const Case& c : cases) {
    EXPECT_THAT(ReadJson(c.text, "f.json"),
                StatusIs(absl::StatusCode::kInvalidArgument,
                         absl::StrCat("f.json:", c.expected)))
        << c.text;
  }
}

TEST(ReadJson, DepthIsLimited) {
  const auto nested = [](int depth) {
    return std::string(depth, '[') + std::string(depth, ']');
  };
  TESSERA_EXPECT_OK(ReadJson(nested(64), "f"));
  EXPECT_THAT(ReadJson(nested(65), "f"),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       "f:1:65: nested deeper than 64 levels"));
  EXPECT_THAT(ReadJson(std::string(1 << 20, '{'), "f"), Not(IsOk()));
  // Depth, not the number of arrays.
  std::string flat = "[";
  for (int i = 0; i < 1000; ++i) flat += "[{}],";
  TESSERA_EXPECT_OK(ReadJson(flat + "]", "f"));
}

TEST(ReadJson, SizeIsLimited) {
  JsonLimits limits;
  limits.max_bytes = 4;
  TESSERA_EXPECT_OK(ReadJson("[12]", "f", limits));
  EXPECT_THAT(ReadJson("[123]", "f", limits),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       "f:1:1: the text has more than 4 bytes"));
}

TEST(ReadJson, ValuesAreCounted) {
  JsonLimits limits;
  limits.max_values = 4;
  TESSERA_EXPECT_OK(ReadJson("{\"a\":[1,2]}", "f", limits));
  EXPECT_THAT(ReadJson("{\"a\":[1,[]],\"b\":2}", "f", limits),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("f:1:17: the text has more than 4 values")));
}

// No prefix of a good text may crash or be read as something else.
TEST(ReadJson, EveryPrefixIsRefused) {
  const std::string text =
      "{\"a\\u00e9\": [1.5e3, true, null, \"\\ud83d\\ude00\"], // c\n"
      "/* d */ \"b\": {\"c\": -2,},}";
  TESSERA_EXPECT_OK(ReadJson(text, "f"));
  for (size_t bytes = 0; bytes < text.size(); ++bytes) {
    EXPECT_THAT(ReadJson(text.substr(0, bytes), "f"),
                StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("f:")))
        << text.substr(0, bytes);
  }
}

}  // namespace
}  // namespace tessera
