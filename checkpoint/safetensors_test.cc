#include "checkpoint/safetensors.h"

#include <stdlib.h>
#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "base/file.h"
#include "base/status_matchers.h"
#include "checkpoint/write_safetensors_test_util.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

namespace tessera {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Pair;

// Builds a file by the format's own rules: length, JSON, elements.
std::string FileText(const std::string& json, const std::string& elements) {
  std::string length(8, '\0');
  for (size_t i = 0; i < length.size(); ++i) {
    length[i] = static_cast<char>(json.size() >> (8 * i) & 0xFF);
  }
  return length + json + elements;
}

class SafetensorsTest : public ::testing::Test {
 protected:
  SafetensorsTest() {
    std::string pattern = ::testing::TempDir() + "/safetensors_XXXXXX";
    TORCH_CHECK(mkdtemp(pattern.data()) != nullptr);
    folder_ = pattern;
    path_ = folder_ + "/m.safetensors";
  }
  ~SafetensorsTest() override { fs::remove_all(folder_); }

  void Write(const std::string& text) { WriteTo("m.safetensors", text); }
  void WriteTo(const std::string& name, const std::string& text) {
    std::ofstream(folder_ + "/" + name, std::ios::binary) << text;
  }
  // Returns the error of Open for a file with this header.
  std::string Fault(const std::string& json, const std::string& elements) {
    Write(FileText(json, elements));
    const auto file = Safetensors::Open(path_);
    if (file.ok()) return "OK";
    EXPECT_EQ(file.status().code(), absl::StatusCode::kDataLoss);
    return absl::StrReplaceAll(std::string(file.status().message()),
                               {{path_, "FILE"}});
  }

  std::string folder_, path_;
};

// One tensor whole, in its dtype and shape.
at::Tensor ReadAll(const Safetensors& file, absl::string_view name) {
  const SafetensorsTensor* tensor = file.Find(name);
  TORCH_CHECK(tensor != nullptr, std::string(name));
  const bool complex = c10::isComplexType(DtypeOf(*tensor));
  const int64_t numel = tensor->numel * (complex ? 2 : 1);
  at::Tensor out =
      torch::empty({numel}, c10::toRealValueType(DtypeOf(*tensor)));
  TESSERA_EXPECT_OK(file.Read(*tensor, {0, numel}, out));
  if (complex) out = at::view_as_complex(out.view({-1, 2}));
  return out.view(tensor->sizes);
}

TEST_F(SafetensorsTest, ReadsBytesAsTheFormatSays) {
  // 1, 2, 3, 4 as float32; 7 and -1 as int64; no element at all.
  const unsigned char raw[] =
      "\xAB\x00\x00\x00\x00\x00\x00\x00"
      "{\"a.\\u00fc\":{\"dtype\":\"F32\",\"shape\":[2,2],\"data_offsets\":[0,"
      "16]},\"__metadata__\":{\"k\":\"v\"},\"n\":{\"dtype\":\"I64\",\"shape\":["
      "2],\"data_offsets\":[16,32]},\"e\":{\"dtype\":\"F16\",\"shape\":[0],"
      "\"data_offsets\":[32,32]}}  "
      "\x00\x00\x80\x3F\x00\x00\x00\x40\x00\x00\x40\x40\x00\x00\x80\x40"
      "\x07\x00\x00\x00\x00\x00\x00\x00\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF";
  std::string text(reinterpret_cast<const char*>(raw), sizeof(raw) - 1);
  text[0] = static_cast<char>(text.size() - 8 - 32);
  Write(text);
  TESSERA_ASSERT_OK_AND_ASSIGN(const auto file, Safetensors::Open(path_));
  EXPECT_THAT(file->metadata(), ElementsAre(Pair("k", "v")));
  ASSERT_EQ(file->tensors().size(), 3);
  EXPECT_EQ(file->tensors()[0].name, "a.\xC3\xBC");
  EXPECT_TRUE(ReadAll(*file, "a.\xC3\xBC")
                  .equal(torch::tensor({{1.F, 2.F}, {3.F, 4.F}})));
  EXPECT_TRUE(ReadAll(*file, "n").equal(torch::tensor({7L, -1L})));
  EXPECT_EQ(ReadAll(*file, "e").numel(), 0);
  EXPECT_EQ(file->bytes_read(), 32);
  EXPECT_EQ(file->Find("a"), nullptr);
}

TEST_F(SafetensorsTest, CastsRangesToWhatIsAskedFor) {
  // More than one piece of a read, at a place that no piece begins at.
  const int64_t numel = 1'000'003;
  const at::Tensor values = torch::randn({numel}).to(torch::kBFloat16);
  TESSERA_ASSERT_OK(WriteSafetensors(path_, {{"w", values}}));
  TESSERA_ASSERT_OK_AND_ASSIGN(const auto file, Safetensors::Open(path_));
  const Range range{7, 900'001};
  for (const auto dtype : {torch::kFloat, torch::kBFloat16, torch::kDouble}) {
    at::Tensor out = torch::empty({range.numel()}, dtype);
    TESSERA_ASSERT_OK(file->Read(*file->Find("w"), range, out));
    EXPECT_TRUE(out.equal(values.slice(0, range.begin, range.end).to(dtype)));
  }
  EXPECT_EQ(file->bytes_read(), 3 * 2 * range.numel());
}

TEST_F(SafetensorsTest, NamesWhatIsNoSuchFile) {
  EXPECT_THAT(Safetensors::Open(path_),
              StatusIs(absl::StatusCode::kNotFound, HasSubstr(path_)));
  Write("1234567");
  EXPECT_THAT(Safetensors::Open(path_),
              StatusIs(absl::StatusCode::kDataLoss,
                       HasSubstr("expected at least 8 bytes, got 7")));
  Write(std::string("\xFF\xE0\xF5\x05\x00\x00\x00\x00", 8) + "{}");
  EXPECT_THAT(Safetensors::Open(path_),
              StatusIs(absl::StatusCode::kDataLoss,
                       HasSubstr("expected a header of 99999999 bytes, got")));
  Write(std::string("\x01\xE1\xF5\x05\x00\x00\x00\x00", 8) + "{}");
  EXPECT_THAT(Safetensors::Open(path_),
              StatusIs(absl::StatusCode::kDataLoss,
                       HasSubstr("at most 100000000 bytes, got 100000001")));
  Write(std::string(8, '\xFF') + "{}");
  EXPECT_THAT(Safetensors::Open(path_),
              StatusIs(absl::StatusCode::kDataLoss, HasSubstr("at most")));
  fs::remove(path_);
  ASSERT_EQ(mkfifo(path_.c_str(), 0600), 0);
  EXPECT_THAT(Safetensors::Open(path_),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("got a folder or a device")));
}

TEST_F(SafetensorsTest, NamesEachFaultOfAHeader) {
  const auto one = [](const std::string& of) { return "{\"w\":" + of + "}"; };
  const auto tensor = [&](const std::string& dtype, const std::string& shape,
                          const std::string& offsets) {
    return one("{\"dtype\":" + dtype + ",\"shape\":" + shape +
               ",\"data_offsets\":" + offsets + "}");
  };
  const std::string four(4, '\0');
  EXPECT_EQ(Fault(tensor("\"F32\"", "[1]", "[0,4]"), four), "OK");
  EXPECT_EQ(Fault("{}", ""), "OK");
  EXPECT_EQ(
      Fault(" {}", ""),
      "FILE: is not a safetensors file: its header does not begin with '{'");
  EXPECT_EQ(Fault("{\"w\" 1}", ""),
            "FILE: header:1:6: expected ':' after the key 'w', got '1'");
  EXPECT_THAT(Fault("{\"w\":{},\"w\":{}}", ""),
              HasSubstr("duplicate key 'w', first at 1:2"));
  EXPECT_THAT(Fault("{\"\xFF\":{}}", ""), HasSubstr("unexpected byte 0xff"));
  EXPECT_EQ(Fault(one("[]"), ""),
            "FILE: tensor 'w': expected an object, got an array");
  EXPECT_EQ(Fault(one("{}"), ""), "FILE: tensor 'w': has no dtype");
  EXPECT_EQ(Fault(tensor("4", "[1]", "[0,4]"), four),
            "FILE: tensor 'w': dtype: expected a string, got a number");
  EXPECT_EQ(Fault(tensor("\"F32\"", "[-1]", "[0,4]"), four),
            "FILE: tensor 'w': shape: expected whole numbers from 0 below "
            "2^63, got -1");
  EXPECT_THAT(Fault(tensor("\"F32\"", "[1.0]", "[0,4]"), four),
              HasSubstr("got 1.0"));
  EXPECT_THAT(Fault(tensor("\"F32\"", "[9223372036854775808]", "[0,4]"), four),
              HasSubstr("got 9223372036854775808"));
  EXPECT_EQ(Fault(tensor("\"F32\"", "[4294967296,4294967296]", "[0,4]"), four),
            "FILE: tensor 'w': shape [4294967296, 4294967296]: expected fewer "
            "than 2^63 elements");
  EXPECT_THAT(Fault(tensor("\"F32\"", "[4611686018427387904]", "[0,4]"), four),
              HasSubstr("4611686018427387904 * 4 bytes"));
  EXPECT_EQ(Fault(tensor("\"F32\"", "[2]", "[0,4]"), four),
            "FILE: tensor 'w': expected 2 * 4 bytes for shape [2] of F32, got "
            "4");
  EXPECT_EQ(Fault(tensor("\"F32\"", "[2]", "[0,8]"), four),
            "FILE: tensor 'w': data_offsets: expected two, [first byte, end), "
            "within the file's 4 bytes of elements, got [0, 8]; is the file "
            "truncated?");
  EXPECT_THAT(Fault(tensor("\"F32\"", "[1]", "[4,0]"), four),
              HasSubstr("got [4, 0]"));
  EXPECT_THAT(Fault(tensor("\"F32\"", "[1]", "[0]"), four),
              HasSubstr("got [0]"));
  EXPECT_EQ(Fault(tensor("\"F32\"", "[1]", "[0,4]"), four + "x"),
            "FILE: expected 4 bytes of elements, got 5 (what lies behind 'w' "
            "belongs to no tensor)");
  EXPECT_EQ(Fault(tensor("\"U8\"", "[2]", "[2,4]"), four),
            "FILE: tensor 'w': data_offsets: expected to begin at 0, where the "
            "header ends, got 2 (a hole)");
  EXPECT_EQ(Fault("{\"a\":{\"dtype\":\"U8\",\"shape\":[3],\"data_offsets\":[0,"
                  "3]},\"b\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":["
                  "2,4]}}",
                  four),
            "FILE: tensor 'b': data_offsets: expected to begin at 3, where 'a' "
            "ends, got 2 (they overlap)");
  EXPECT_EQ(Fault("{\"__metadata__\":[]}", ""),
            "FILE: __metadata__: expected an object, got an array");
  EXPECT_EQ(Fault("{\"__metadata__\":{\"k\":1}}", ""),
            "FILE: __metadata__: 'k': expected a string, got a number");
}

TEST_F(SafetensorsTest, RefusesAnUnknownDtypeOnlyWhenItIsRead) {
  EXPECT_EQ(Fault("{\"q\":{\"dtype\":\"F4\",\"shape\":[8],\"data_offsets\":[0,"
                  "4]}}",
                  "1234"),
            "OK");
  TESSERA_ASSERT_OK_AND_ASSIGN(const auto file, Safetensors::Open(path_));
  EXPECT_THAT(file->Read(*file->Find("q"), {0, 1}, torch::empty({1})),
              StatusIs(absl::StatusCode::kUnimplemented,
                       absl::StrCat(path_,
                                    ": tensor 'q': dtype F4 is none "
                                    "that libtorch has")));
}

TEST_F(SafetensorsTest, AFileThatIsCutOffLaterIsAnError) {
  TESSERA_ASSERT_OK(WriteSafetensors(path_, {{"w", torch::ones({1'000'000})}}));
  TESSERA_ASSERT_OK_AND_ASSIGN(const auto file, Safetensors::Open(path_));
  fs::resize_file(path_, 2'000'000);
  EXPECT_THAT(
      file->Read(*file->Find("w"), {0, 1'000'000}, torch::empty({1'000'000})),
      StatusIs(absl::StatusCode::kDataLoss,
               AllOf(HasSubstr(path_ + ": tensor 'w'"),
                     HasSubstr("the file ends at byte 2000000"))));
}

// Other weights under the same header give another line; writing to an open
// file is an error.
TEST_F(SafetensorsTest, TellsFilesApart) {
  const at::Tensor values = torch::randn({1'000'000});
  TESSERA_ASSERT_OK(WriteSafetensors(path_, {{"a", values}, {"b", values}}));
  TESSERA_ASSERT_OK_AND_ASSIGN(const auto file, Safetensors::Open(path_));
  const std::string print = file->Fingerprint().value();
  EXPECT_EQ(file->Fingerprint().value(), print);
  TESSERA_EXPECT_OK(file->CheckUnchanged());
  const std::string other = folder_ + "/other.safetensors";
  for (const int64_t at : {0, 999'999}) {
    at::Tensor changed = values.clone();
    changed[at] += 1;
    TESSERA_ASSERT_OK(WriteSafetensors(other, {{"a", values}, {"b", changed}}));
    EXPECT_NE(Safetensors::Open(other).value()->Fingerprint().value(), print);
  }
  fs::last_write_time(
      path_, fs::last_write_time(path_) + std::chrono::nanoseconds(4'000'000));
  EXPECT_THAT(file->CheckUnchanged(),
              StatusIs(absl::StatusCode::kAborted, HasSubstr(path_)));
  // Replacing a file does not affect those that have it open.
  TESSERA_ASSERT_OK_AND_ASSIGN(const auto again, Safetensors::Open(path_));
  fs::rename(other, path_);
  TESSERA_EXPECT_OK(again->CheckUnchanged());
}

TEST_F(SafetensorsTest, OpensFoldersAndTheirIndex) {
  const at::Tensor a = torch::randn({3}), b = torch::randn({2, 2});
  EXPECT_THAT(Safetensors::Open(folder_),
              StatusIs(absl::StatusCode::kNotFound, HasSubstr("got none")));
  TESSERA_ASSERT_OK(WriteSafetensors(folder_ + "/1.safetensors", {{"a", a}}));
  TESSERA_ASSERT_OK_AND_ASSIGN(auto file, Safetensors::Open(folder_));
  EXPECT_EQ(file->tensors().size(), 1);
  TESSERA_ASSERT_OK(WriteSafetensors(folder_ + "/2.safetensors", {{"b", b}}));
  EXPECT_THAT(Safetensors::Open(folder_),
              StatusIs(absl::StatusCode::kNotFound,
                       HasSubstr("got 1.safetensors, 2.safetensors; name")));
  const std::string index = folder_ + "/model.safetensors.index.json";
  const auto write_index = [&](const std::string& json) {
    std::ofstream(index) << json;
  };
  write_index(
      "{\"metadata\":{\"total_size\":28},\"weight_map\":{\"b\":"
      "\"2.safetensors\",\"a\":\"1.safetensors\"}}");
  for (const std::string& path : {folder_, index}) {
    TESSERA_ASSERT_OK_AND_ASSIGN(file, Safetensors::Open(path));
    EXPECT_TRUE(ReadAll(*file, "a").equal(a));
    EXPECT_TRUE(ReadAll(*file, "b").equal(b));
  }
  const auto fault = [&](const std::string& json) {
    write_index(json);
    return absl::StrReplaceAll(Safetensors::Open(folder_).status().ToString(),
                               {{folder_ + "/", ""}});
  };
  EXPECT_THAT(fault("{}"), HasSubstr("index.json: expected an object with"));
  EXPECT_THAT(fault("{\"weight_map\":{\"a\":\"../1.safetensors\"}}"),
              HasSubstr("'a': expected the name of a file in the same folder, "
                        "got '../1.safetensors'"));
  EXPECT_THAT(fault("{\"weight_map\":{\"a\":\"3.safetensors\"}}"),
              AllOf(HasSubstr("NOT_FOUND: 3.safetensors"),
                    HasSubstr("index.json names it for tensor 'a')")));
  EXPECT_THAT(fault("{\"weight_map\":{\"a\":\"1.safetensors\",\"c\":\"1."
                    "safetensors\"}}"),
              HasSubstr("index.json: places tensor 'c' in 1.safetensors, "
                        "which does not have it"));
  EXPECT_THAT(fault("{\"weight_map\":{\"b\":\"1.safetensors\"}}"),
              HasSubstr("1.safetensors: tensor 'a': expected none of that "
                        "name"));
}

TEST_F(SafetensorsTest, WritesWhatItReads) {
  std::vector<std::pair<std::string, at::Tensor>> tensors;
  for (const auto dtype :
       {torch::kFloat, torch::kDouble, torch::kHalf, torch::kBFloat16,
        torch::kLong, torch::kInt, torch::kShort, torch::kChar, torch::kByte,
        torch::kBool, torch::kComplexFloat, torch::kFloat8_e4m3fn,
        torch::kFloat8_e5m2, torch::kUInt16, torch::kUInt32, torch::kUInt64}) {
    tensors.emplace_back(absl::StrCat("\"\n\xC3\xBC", c10::toString(dtype)),
                         torch::arange(2, 8).view({2, 3}).to(dtype));
  }
  tensors.emplace_back("scalar", torch::tensor(2.5));
  tensors.emplace_back("empty", torch::empty({0, 3}));
  tensors.emplace_back("transposed", torch::randn({5, 7}).t());
  TESSERA_ASSERT_OK(WriteSafetensors(path_, tensors));
  TESSERA_ASSERT_OK_AND_ASSIGN(const auto file, Safetensors::Open(path_));
  EXPECT_THAT(file->metadata(), ElementsAre(Pair("format", "pt")));
  for (const auto& [name, value] : tensors) {
    const at::Tensor got = ReadAll(*file, name);
    ASSERT_EQ(got.scalar_type(), value.scalar_type()) << name;
    EXPECT_EQ(got.sizes(), value.sizes()) << name;
    EXPECT_TRUE(got.reshape(-1)
                    .view(torch::kByte)
                    .equal(value.reshape(-1).view(torch::kByte)))
        << name;
    EXPECT_EQ(
        file->Find(name)->offset %
            std::max<int64_t>(1, static_cast<int64_t>(value.element_size())),
        0)
        << name;
  }
  EXPECT_EQ(ReadAll(*file, "scalar").item<float>(), 2.5);
  // The bytes do not depend on the order.
  const std::string first = ReadWholeFile(path_).value();
  std::reverse(tensors.begin(), tensors.end());
  TESSERA_ASSERT_OK(WriteSafetensors(path_, tensors));
  EXPECT_EQ(ReadWholeFile(path_).value(), first);
}

// The fuzzer's checks on each file of its corpus, on each of its prefixes, and
// with each byte replaced by some that matter.
TEST(SafetensorsCorpusTest, SurvivesMutations) {
  int files = 0;
  for (const auto& entry : fs::directory_iterator("checkpoint/testdata")) {
    TESSERA_ASSERT_OK_AND_ASSIGN(std::string text,
                                 ReadWholeFile(entry.path().string()));
    const auto run = [](const std::string& input) {
      LLVMFuzzerTestOneInput(reinterpret_cast<const uint8_t*>(input.data()),
                             input.size());
    };
    for (size_t bytes = 0; bytes <= text.size(); ++bytes) {
      run(text.substr(0, bytes));
    }
    for (char& byte : text) {
      const char kept = byte;
      for (const char other : {'\0', '"', '}', ',', '9', '\xFF'}) {
        byte = other;
        run(text);
      }
      byte = kept;
    }
    ++files;
  }
  EXPECT_GE(files, 6);
}

}  // namespace
}  // namespace tessera
