// The three formats, and what is read back of them.
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <limits>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "base/file.h"
#include "base/page/number_text.h"
#include "base/status_matchers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "monitor/append_file.h"
#include "monitor/csv_writer.h"
#include "monitor/event.pb.h"
#include "monitor/event_writer.h"
#include "monitor/histogram.h"
#include "monitor/jsonl_writer.h"
#include "monitor/record_framing.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::SizeIs;
using ::testing::StartsWith;

constexpr double kInf = std::numeric_limits<double>::infinity();

class WritersTest : public ::testing::Test {
 protected:
  WritersTest() {
    std::string name = absl::StrCat(::testing::TempDir(), "/writers_XXXXXX");
    folder_ = ::mkdtemp(name.data());
  }
  ~WritersTest() override { std::filesystem::remove_all(folder_); }

  std::string Path(absl::string_view name) const {
    return absl::StrCat(folder_, "/", name);
  }
  std::string Content(absl::string_view name) const {
    const auto content = ReadWholeFile(Path(name));
    return content.ok() ? *content : content.status().ToString();
  }
  static void Put(const std::string& path, absl::string_view text) {
    std::ofstream(path) << text;
  }

  static StepMetrics Metrics(int64_t step, double loss) {
    StepMetrics metrics;
    metrics.step = step;
    metrics.samples = 8 * step;
    metrics.unix_seconds = 1764302400.25;
    metrics.scalars = {{"loss", "Train/Samples/train_loss", loss},
                       {"my own", "my own", 0.1}};
    return metrics;
  }
  std::string folder_;
};

TEST_F(WritersTest, JsonlIsALineForAStep) {
  TESSERA_ASSERT_OK_AND_ASSIGN(auto writer,
                               OpenJsonlWriter(Path("a/b/metrics.jsonl")));
  TESSERA_ASSERT_OK(writer->Write(Metrics(1, 2.5)));
  StepMetrics second = Metrics(2, std::nan(""));
  second.scalars.push_back({"up", "up", kInf});
  second.scalars.push_back({"down", "down", -kInf});
  second.texts.push_back({"note", "a \"word\"\n\xc3\xa9"});
  second.histograms.push_back({"h", HistogramOf({1, 2, 2}, 2)});
  TESSERA_ASSERT_OK(writer->Write(second));
  // Nothing has been flushed or closed yet.
  EXPECT_EQ(
      Content("a/b/metrics.jsonl"),
      "{\"step\": 1, \"samples\": 8, \"time\": 1764302400.250000, "
      "\"loss\": 2.5, \"my own\": 0.1}\n"
      "{\"step\": 2, \"samples\": 16, \"time\": 1764302400.250000, "
      "\"loss\": \"NaN\", \"my own\": 0.1, \"up\": \"Infinity\", "
      "\"down\": \"-Infinity\", \"texts\": {\"note\": "
      "\"a \\\"word\\\"\\u000a\xc3\xa9\"}, \"histograms\": {\"h\": "
      "{\"min\": 1, \"max\": 2, \"sum\": 5, \"count\": 3, \"not_finite\": 0, "
      "\"limits\": [1.5, 2], \"counts\": [1, 2]}}}\n");
  TESSERA_EXPECT_OK(writer->Flush());
}

TEST_F(WritersTest, JsonlEndsTheHalfLineOfOneThatWasKilled) {
  Put(Path("metrics.jsonl"), "{\"step\": 1}\n{\"ste");
  TESSERA_ASSERT_OK_AND_ASSIGN(auto writer,
                               OpenJsonlWriter(Path("metrics.jsonl")));
  TESSERA_ASSERT_OK(writer->Write(Metrics(2, 1)));
  EXPECT_THAT(
      absl::StrSplit(Content("metrics.jsonl"), '\n'),
      ElementsAre("{\"step\": 1}", "{\"ste", StartsWith("{\"step\": 2, "), ""));
}

TEST_F(WritersTest, CsvIsAFileForATag) {
  {
    TESSERA_ASSERT_OK_AND_ASSIGN(auto writer, OpenCsvWriter(Path("job")));
    TESSERA_ASSERT_OK(writer->Write(Metrics(1, 2.5)));
    TESSERA_ASSERT_OK(writer->Write(Metrics(2, std::nan(""))));
    EXPECT_EQ(Content("job/Train_Samples_train_loss.csv"),
              "step,train_loss\n8,2.5\n16,nan\n");
  }
  // A run that goes on.
  TESSERA_ASSERT_OK_AND_ASSIGN(auto writer, OpenCsvWriter(Path("job")));
  TESSERA_ASSERT_OK(writer->Write(Metrics(3, -kInf)));
  EXPECT_EQ(Content("job/Train_Samples_train_loss.csv"),
            "step,train_loss\n8,2.5\n16,nan\n24,-inf\n");
  EXPECT_EQ(Content("job/my_own.csv"), "step,my own\n8,0.1\n16,0.1\n24,0.1\n");
}

TEST_F(WritersTest, CsvHasMoreTagsThanOpenFiles) {
  TESSERA_ASSERT_OK_AND_ASSIGN(auto writer, OpenCsvWriter(Path("job")));
  StepMetrics metrics;
  for (int i = 0; i < 210; ++i) {
    metrics.scalars.push_back({"", absl::StrCat("t/", i), 1.0 * i});
  }
  for (metrics.samples = 1; metrics.samples <= 2; ++metrics.samples) {
    TESSERA_ASSERT_OK(writer->Write(metrics));
  }
  EXPECT_EQ(Content("job/t_0.csv"), "step,0\n1,0\n2,0\n");
  EXPECT_EQ(Content("job/t_209.csv"), "step,209\n1,209\n2,209\n");
}

// The little-endian number that `bytes` begin with.
template <typename T>
T Number(absl::string_view bytes) {
  T number = 0;
  bytes.copy(reinterpret_cast<char*>(&number), sizeof(T));
  return number;
}

// The events of the one file in a folder.
std::vector<tensorboard::Event> EventsIn(const std::string& folder) {
  std::vector<tensorboard::Event> events;
  for (const auto& file : std::filesystem::directory_iterator(folder)) {
    EXPECT_THAT(file.path().filename().string(),
                StartsWith("events.out.tfevents."));
    const auto content = ReadWholeFile(file.path().string());
    TESSERA_EXPECT_OK(content.status());
    for (absl::string_view rest = *content; !rest.empty();) {
      const std::string record(rest.substr(12, Number<uint64_t>(rest)));
      events.emplace_back();
      EXPECT_TRUE(events.back().ParseFromString(record));
      if (!absl::ConsumePrefix(&rest, Framed(record))) {
        ADD_FAILURE() << "record " << events.size();
        break;
      }
    }
  }
  return events;
}

TEST_F(WritersTest, EventsAreReadBack) {
  TESSERA_ASSERT_OK_AND_ASSIGN(auto writer, OpenEventWriter(Path("runs/one")));
  StepMetrics metrics = Metrics(1, 2.5);
  metrics.texts.push_back({"note", "text"});
  metrics.histograms.push_back({"weights", HistogramOf({1, 2, 2}, 2)});
  TESSERA_ASSERT_OK(writer->Write(metrics));
  TESSERA_ASSERT_OK(writer->Write(Metrics(2, std::nan(""))));
  const auto events = EventsIn(Path("runs/one"));
  ASSERT_THAT(events, SizeIs(3));
  EXPECT_EQ(events[0].file_version(), "brain.Event:2");
  EXPECT_EQ(events[1].wall_time(), 1764302400.25);
  EXPECT_EQ(events[1].step(), 8);
  const auto& values = events[1].summary().value();
  ASSERT_THAT(values, SizeIs(4));
  EXPECT_EQ(values[0].tag(), "Train/Samples/train_loss");
  EXPECT_EQ(values[0].simple_value(), 2.5f);
  EXPECT_EQ(values[2].tag(), "weights");
  EXPECT_THAT(values[2].histo().bucket_limit(), ElementsAre(1.5, 2));
  EXPECT_THAT(values[2].histo().bucket(), ElementsAre(1, 2));
  EXPECT_EQ(values[2].histo().num(), 3);
  EXPECT_EQ(values[3].tag(), "note/text_summary");
  EXPECT_EQ(values[3].metadata().plugin_data().plugin_name(), "text");
  EXPECT_THAT(values[3].tensor().string_val(), ElementsAre("text"));
  EXPECT_TRUE(std::isnan(events[2].summary().value(0).simple_value()));
}

TEST_F(WritersTest, EachEventWriterHasItsOwnFile) {
  TESSERA_ASSERT_OK(OpenEventWriter(folder_).status());
  TESSERA_ASSERT_OK(OpenEventWriter(folder_).status());
  EXPECT_THAT(EventsIn(folder_), SizeIs(2));
}

// The value of tensorflow's own tests of that checksum.
TEST(RecordFramingTest, ChecksumsAreMasked) {
  const uint32_t masked = MaskedCrc32c("123456789");
  const uint32_t turned = masked - 0xa282ead8U;
  EXPECT_EQ((turned >> 17) | (turned << 15), 0xe3069283U);
}

TEST(RecordFramingTest, LengthAndBytesHaveAChecksumEach) {
  const std::string framed = Framed("one");
  const std::string length("\3\0\0\0\0\0\0\0", 8);
  ASSERT_EQ(framed.size(), 8 + 4 + 3 + 4u);
  EXPECT_EQ(framed.substr(0, 8), length);
  EXPECT_EQ(Number<uint32_t>(framed.substr(8)), MaskedCrc32c(length));
  EXPECT_EQ(framed.substr(12, 3), "one");
  EXPECT_EQ(Number<uint32_t>(framed.substr(15)), MaskedCrc32c("one"));
}

TEST_F(WritersTest, ErrorsNameThePath) {
  Put(Path("file"), "x");
  const std::string below = Path("file/run");
  EXPECT_THAT(OpenJsonlWriter(below + "/metrics.jsonl").status().message(),
              HasSubstr(below));
  EXPECT_THAT(OpenCsvWriter(below).status().message(), HasSubstr(below));
  EXPECT_THAT(OpenEventWriter(below).status().message(), HasSubstr(below));
}

// /dev/full is a disk that is full.
TEST_F(WritersTest, AFullDiskIsAnError) {
  TESSERA_ASSERT_OK_AND_ASSIGN(auto writer, OpenJsonlWriter("/dev/full"));
  EXPECT_THAT(writer->Write(Metrics(1, 1)).message(),
              AllOf(HasSubstr("/dev/full"), HasSubstr("No space left")));
}

// A partial line on a full disk would hide the next line.
TEST_F(WritersTest, HalfALineIsTakenBack) {
  TESSERA_ASSERT_OK_AND_ASSIGN(auto writer, OpenJsonlWriter(Path("m.jsonl")));
  TESSERA_EXPECT_OK(writer->Write(Metrics(1, 2.5)));
  const std::string before = Content("m.jsonl");
  rlimit limit = {};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &limit), 0);
  const rlimit full = {before.size() + 10, limit.rlim_max};
  const auto old = signal(SIGXFSZ, SIG_IGN);
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &full), 0);
  const absl::Status failed = writer->Write(Metrics(2, 2.5));
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &limit), 0);
  signal(SIGXFSZ, old);
  EXPECT_FALSE(failed.ok());
  EXPECT_EQ(Content("m.jsonl"), before);
  TESSERA_EXPECT_OK(writer->Write(Metrics(3, 2.5)));
  EXPECT_THAT(Content("m.jsonl"), StartsWith(before + "{\"step\": 3,"));
}

TEST(NumberTextTest, IsReadBackToTheBit) {
  for (const double value :
       {0.1, 1.0 / 3, 1e-5, 123456789012345678.0, -0.0, 5e-324,
        static_cast<double>(0.1f), std::numeric_limits<double>::max()}) {
    EXPECT_EQ(std::strtod(NumberText(value).c_str(), nullptr), value);
  }
  EXPECT_EQ(NumberText(0.1), "0.1");
  EXPECT_EQ(NumberText(3), "3");
  EXPECT_EQ(NumberText(100000), "100000");
  EXPECT_EQ(NumberText(5e-324), "5e-324");
  EXPECT_EQ(NumberText(-0.0), "-0");
}

TEST(JoinPathTest, EmptyPartsAreNone) {
  EXPECT_EQ(JoinPath("out", "job"), "out/job");
  EXPECT_EQ(JoinPath("out/", "job"), "out/job");
  EXPECT_EQ(JoinPath("", "job"), "job");
  EXPECT_EQ(JoinPath("out", ""), "out");
}

}  // namespace
}  // namespace tessera
