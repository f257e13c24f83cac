#include "examples/gpt/sample.h"

#include "ATen/Context.h"
#include "ATen/Functions.h"
#include "gtest/gtest.h"

namespace {

Gpt SmallGpt() {
  at::manual_seed(0);
  return Gpt(GptOptions().dim(32).layers(2).heads(4).seq(16));
}

SampleOptions Bytes(int64_t bytes) {
  SampleOptions options;
  options.bytes = bytes;
  return options;
}

TEST(SampleTest, GivesThatManyBytesPastTheLongestInputToo) {
  EXPECT_EQ(Sample(SmallGpt(), "ab", Bytes(40)).size(), 40u);
  EXPECT_EQ(Sample(SmallGpt(), std::string(50, 'x'), Bytes(3)).size(), 3u);
  EXPECT_EQ(Sample(SmallGpt(), "", Bytes(3)).size(), 3u);
  EXPECT_EQ(Sample(SmallGpt(), "ab", Bytes(0)), "");
}

TEST(SampleTest, TheSeedDecidesTheText) {
  SampleOptions options = Bytes(30), other = Bytes(30);
  other.seed = 1;
  const std::string text = Sample(SmallGpt(), "ab", options);
  at::manual_seed(99);  // the default generator has no say
  Gpt model = SmallGpt();
  at::rand({5});
  EXPECT_EQ(Sample(model, "ab", options), text);
  EXPECT_NE(Sample(model, "ab", other), text);
}

TEST(SampleTest, TheLikeliestByteWithoutTemperatureOrWithTopKOfOne) {
  SampleOptions cold = Bytes(10), narrow = Bytes(10);
  cold.temperature = 0;
  narrow.top_k = 1;
  const std::string text = Sample(SmallGpt(), "ab", cold);
  EXPECT_EQ(Sample(SmallGpt(), "ab", narrow), text);
  const auto tokens = at::tensor({97, 98}, at::kLong).unsqueeze(0);
  const auto best = SmallGpt()->forward(tokens)[0][-1].argmax();
  EXPECT_EQ(static_cast<unsigned char>(text[0]), best.item<int64_t>());
}

TEST(SampleTest, ATopKBeyondTheVocabularyMeansAllOfIt) {
  SampleOptions all = Bytes(10), wide = Bytes(10);
  all.top_k = 0;
  wide.top_k = 1000;
  EXPECT_EQ(Sample(SmallGpt(), "ab", all), Sample(SmallGpt(), "ab", wide));
}

TEST(SampleTest, LeavesTheModelAsItWas) {
  Gpt model = SmallGpt();
  Sample(model, "ab", Bytes(2));
  EXPECT_TRUE(model->is_training());
  model->eval();
  Sample(model, "ab", Bytes(2));
  EXPECT_FALSE(model->is_training());
  EXPECT_FALSE(model->parameters().front().grad().defined());
}

TEST(PrintableTest, EscapesWhatATerminalWouldObey) {
  EXPECT_EQ(Printable("a\nb \x1b[31m\xff"), "a\nb \\x1b[31m\\xff");
}

}  // namespace
