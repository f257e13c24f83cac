// Real DeepSpeed configurations, with what DeepSpeed makes of them. The folder
// that TESSERA_DS_CONFIGS names holds the files and ORACLE.jsonl: of each file
// a line of JSON {"file", "raw_w<W>": {...}, "filled_w<W>": {...}} with the
// verdict and the resolved values at W ranks, as it is and with "auto" filled.
#include <cstdlib>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "base/file.h"
#include "base/status_matchers.h"
#include "config/config.h"
#include "config/config_report.h"
#include "config/config_text.h"
#include "config/reader/json_reader.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tessera {
namespace {

// The oracle filled "auto" with these values.
constexpr char kFilled[] =
    "per_device_train_batch_size=2,gradient_accumulation_steps=1,"
    "max_grad_norm=1,learning_rate=5e-5,adam_beta1=0.9,adam_beta2=0.999,"
    "adam_epsilon=1e-8,weight_decay=0,warmup_steps=100,max_steps=1000,"
    "bf16=true,fp16=false,hidden_size=1024";

std::string Shown(const JsonValue* value) {
  if (value == nullptr) return "absent";
  return value->kind == JsonKind::kNumber ? absl::StrCat(value->number)
                                          : ToJsonText(*value);
}

class DsConfigs : public ::testing::Test {
 protected:
  void SetUp() override {
    const char* folder = std::getenv("TESSERA_DS_CONFIGS");
    if (folder == nullptr || *folder == '\0') {
      GTEST_SKIP() << "TESSERA_DS_CONFIGS names no folder";
    }
    folder_ = folder;
  }

  // Differences of one of their values from ours, of the keys in theirs.
  void Compare(const std::string& path, const JsonValue* theirs,
               const JsonValue* ours) {
    if (theirs != nullptr && theirs->kind == JsonKind::kObject) {
      for (const JsonMember& member : theirs->members) {
        // Forms that we have turned into others.
        if (absl::StartsWith(member.key, "cpu_offload") ||
            member.key == "stage3_gather_fp16_weights_on_model_save") {
          continue;
        }
        Compare(absl::StrCat(path, ".", member.key), &member.value,
                FindEitherName(ours, member.key));
      }
      return;
    }
    if (Shown(theirs) != Shown(ours)) {
      differences_.push_back(absl::StrCat(path, ": DeepSpeed ", Shown(theirs),
                                          ", here ", Shown(ours)));
    }
  }

  static const JsonValue* FindEitherName(const JsonValue* object,
                                         const std::string& key) {
    if (object == nullptr || object->kind != JsonKind::kObject) return nullptr;
    const JsonValue* found = object->Find(key);
    return found != nullptr ? found
                            : object->Find(absl::StrCat("stage3_", key));
  }

  void CompareAll(const JsonValue& theirs, const proto::Config& config) {
    const absl::StatusOr<JsonValue> ours = ReadJson(ConfigToJson(config), "");
    ASSERT_TRUE(ours.ok()) << ours.status();
    for (const auto& [their_key, our_key] :
         {std::pair("train_batch_size", "train_batch_size"),
          std::pair("micro", "train_micro_batch_size_per_gpu"),
          std::pair("gas", "gradient_accumulation_steps"),
          std::pair("gradient_clipping", "gradient_clipping"),
          std::pair("fp16", "fp16"), std::pair("bf16", "bf16"),
          std::pair("zero", "zero_optimization")}) {
      Compare(our_key, theirs.Find(their_key), ours->Find(our_key));
    }
  }

  // One file at one W, as it is or filled.
  void Check(const std::string& file, const std::string& text,
             const std::string& mode, int world_size, const JsonValue& theirs) {
    ++cases_;
    const absl::StatusOr<AutoValues> values =
        AutoValues::Parse(mode == "filled" ? kFilled : "");
    const absl::StatusOr<ConfigReport> report =
        ReadConfig(text, file, world_size, *values);
    const bool ours = report.ok() && report->faults.empty();
    const bool accepted = theirs.Find("ok")->boolean;
    // Its reader does not know yet that ranks have no samples of their own.
    if (report.ok() && accepted && TensorRanksOf(report->config) > 1) {
      ++divided_cases_;
      accepted_.insert(file);
      divided_.insert(file);
      return;
    }
    if (accepted) accepted_.insert(file);
    if (!accepted && ours) {
      differences_.push_back("DeepSpeed rejects it");
    } else if (accepted && !ours) {
      ++refused_cases_;
      for (const ConfigFault& fault : report->faults) {
        refused_[file].insert(fault.path);
      }
      CheckIgnoring(file, text, world_size, *values, theirs);
    } else if (accepted) {
      ++same_cases_;
      CompareAll(theirs, report->config);
    }
    for (const std::string& difference : differences_) {
      ADD_FAILURE() << file << ", " << mode << ", " << world_size
                    << " ranks: " << difference;
    }
    differences_.clear();
  }

  // One that is refused here: not if unknown keys are ignored.
  void CheckIgnoring(const std::string& file, std::string text, int world_size,
                     const AutoValues& values, const JsonValue& theirs) {
    text.insert(text.find('{') + 1, "\"unknown_keys\": \"warn\", ");
    const auto config = ParseConfig(text, file, world_size, values);
    if (config.ok()) return CompareAll(theirs, *config);
    differences_.push_back(std::string(config.status().message()));
  }

  std::string folder_;
  std::vector<std::string> differences_;
  int cases_ = 0, same_cases_ = 0, refused_cases_ = 0, divided_cases_ = 0;
  std::set<std::string> divided_;   // over ranks: their layers
  std::set<std::string> accepted_;  // by DeepSpeed
  std::map<std::string, std::set<std::string>>
      refused_;  // of these, our faults
};

TEST_F(DsConfigs, ComeToWhatDeepSpeedMakesOfThem) {
  TESSERA_ASSERT_OK_AND_ASSIGN(const std::string oracle,
                               ReadWholeFile(folder_ + "/ORACLE.jsonl"));
  TESSERA_ASSERT_OK_AND_ASSIGN(const std::string page,
                               ReadWholeFile("docs/config.md"));
  size_t files = 0;
  for (const absl::string_view line :
       absl::StrSplit(oracle, '\n', absl::SkipEmpty())) {
    TESSERA_ASSERT_OK_AND_ASSIGN(const JsonValue row,
                                 ReadJson(line, "ORACLE.jsonl"));
    const std::string file = row.Find("file")->text;
    TESSERA_ASSERT_OK_AND_ASSIGN(const std::string text,
                                 ReadWholeFile(folder_ + "/" + file));
    ++files;
    for (const std::string mode : {"raw", "filled"}) {
      for (const int world_size : {1, 2, 4, 8}) {
        const JsonValue* theirs =
            row.Find(absl::StrCat(mode, "_w", world_size));
        if (theirs != nullptr) Check(file, text, mode, world_size, *theirs);
      }
    }
  }
  EXPECT_GT(files, 0);
  RecordProperty("files", static_cast<int>(files));
  RecordProperty("cases", cases_);
  RecordProperty("accepted_by_deepspeed", static_cast<int>(accepted_.size()));
  // At most one in twenty, each named in the documentation with all its keys.
  EXPECT_LE(20 * refused_.size(), accepted_.size());
  const auto named = [&](absl::string_view words) {
    EXPECT_TRUE(absl::StrContains(page, words)) << "docs/config.md: " << words;
  };
  for (const auto& [file, keys] : refused_) {
    named(absl::StrCat("`", file.substr(file.find("__") + 2), "`"));
    for (const std::string& key : keys) named(absl::StrCat("`", key, "`"));
  }
  named(absl::StrCat("for ", files, " configurations"));
  named(absl::StrCat("the same | ",
                     accepted_.size() - refused_.size() - divided_.size(),
                     " files, ", same_cases_, " cases |"));
  named(absl::StrCat("layers divided over ranks, not compared | ",
                     divided_.size(), " files, ", divided_cases_, " cases |"));
  named(absl::StrCat(
      "refused here | ", refused_.size(), " files, ", refused_cases_,
      " cases | ", files - accepted_.size(), " files, ",
      cases_ - same_cases_ - refused_cases_ - divided_cases_, " cases |"));
}

}  // namespace
}  // namespace tessera
