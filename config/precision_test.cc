// 16-bit computing, and the dtypes of gradients and buffers.
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_matchers.h"
#include "config/config.h"
#include "config/config_report.h"
#include "config/config_test_util.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tessera {
namespace {

using ::absl::StatusCode;
using ::testing::HasSubstr;

std::string With(absl::string_view members) {
  return Json(absl::StrCat("\"train_batch_size\": 1, ", members));
}

TEST(Fp16, AllKeys) {
  TESSERA_ASSERT_OK_AND_ASSIGN(
      const proto::Config config,
      ParseConfig(With(R"("fp16": {"enabled": true, "auto_cast": true,
        "loss_scale": 1024, "initial_scale_power": 12, "hysteresis": 3,
        "loss_scale_window": 1e2, "consecutive_hysteresis": true,
        "min_loss_scale": 2, "name_overflows": true})"),
                  "f.json", 1));
  EXPECT_EQ(config.fp16().ShortDebugString(),
            "enabled: true auto_cast: true loss_scale: 1024 "
            "initial_scale_power: 12 loss_scale_window: 100 hysteresis: 3 "
            "consecutive_hysteresis: true min_loss_scale: 2 "
            "fp16_master_weights_and_grads: false "
            "name_overflows: true");
  EXPECT_TRUE(config.precision().cast_inputs());
}

TEST(Fp16, HasRanges) {
  const std::pair<const char*, const char*> cases[] = {
      {"\"loss_scale\": 0.5", "OK"},
      {"\"loss_scale\": -1",
       "loss_scale: expected a finite number of at least 0, got -1"},
      {"\"loss_scale\": \"dynamic\"",
       "loss_scale: expected a number, got the string \"dynamic\""},
      {"\"initial_scale_power\": 0", "OK"},
      {"\"initial_scale_power\": 127", "OK"},
      {"\"initial_scale_power\": -1",
       "initial_scale_power: expected 0 to 127, got -1"},
      {"\"initial_scale_power\": 128",
       "initial_scale_power: expected 0 to 127, got 128"},
      {"\"loss_scale_window\": 1", "OK"},
      {"\"hysteresis\": 1", "OK"},
      {"\"hysteresis\": 0", "hysteresis: expected at least 1, got 0"},
      {"\"min_loss_scale\": 1", "OK"},
      {"\"min_loss_scale\": 0.5",
       "min_loss_scale: expected an integer, got 0.5"},
      {"\"opt_level\": \"O2\"", "opt_level: unknown key"},
  };
  for (const auto& [member, fault] : cases) {
    const std::string expected =
        fault == std::string("OK") ? fault : absl::StrCat("fp16.", fault);
    EXPECT_EQ(FaultOf(With(absl::StrCat("\"fp16\": {", member, "}"))),
              expected);
  }
  EXPECT_THAT(
      ParseConfig("train_batch_size: 1 fp16 { loss_scale: inf }", "f.pbtxt", 1),
      StatusIs(StatusCode::kInvalidArgument, HasSubstr("fp16.loss_scale")));
}

// As in DeepSpeed, the two keys mean nothing elsewhere.
TEST(Fp16, BoundsOfADynamicScaleHoldForOneOnly) {
  for (const char* key : {"loss_scale_window", "min_loss_scale"}) {
    const auto fault = [&](absl::string_view members, int value) {
      return FaultOf(With(
          absl::StrCat("\"fp16\": {", members, "\"", key, "\": ", value, "}")));
    };
    for (const int value : {0, -1}) {
      EXPECT_EQ(fault("", value), "OK");
      EXPECT_EQ(fault("\"enabled\": false, ", value), "OK");
      EXPECT_EQ(fault("\"enabled\": true, \"loss_scale\": 128, ", value), "OK");
      EXPECT_EQ(fault("\"enabled\": true, ", value),
                absl::StrCat("fp16.", key,
                             ": expected at least 1 where fp16 is enabled and "
                             "loss_scale is 0, got ",
                             value));
    }
    EXPECT_EQ(fault("\"enabled\": true, ", 1), "OK");
  }
}

// A dynamic scale may skip more steps than that before it is low enough.
TEST(SkippedSteps, MayBeSoManyInARow) {
  const auto most = [](absl::string_view members) {
    const auto config = ParseConfig(With(members), "f.json", 1);
    TESSERA_EXPECT_OK(config.status());
    return config.ok() ? config->precision().max_skipped_in_a_row() : -1;
  };
  EXPECT_EQ(most("\"bf16\": {\"enabled\": true}"), 50);
  EXPECT_EQ(most("\"fp16\": {\"enabled\": true}"), 50);
  EXPECT_EQ(most("\"fp16\": {\"enabled\": true, \"hysteresis\": 90, "
                 "\"initial_scale_power\": 20}"),
            110);
  EXPECT_EQ(most("\"fp16\": {\"enabled\": true, \"hysteresis\": 90, "
                 "\"loss_scale\": 2}"),
            50);
  EXPECT_EQ(most("\"precision\": {\"max_skipped_in_a_row\": 0}"), 0);
  EXPECT_EQ(most("\"precision\": {\"max_skipped_in_a_row\": 7}, \"fp16\": "
                 "{\"enabled\": true, \"initial_scale_power\": 100}"),
            7);
  EXPECT_EQ(FaultOf(With("\"precision\": {\"max_skipped_in_a_row\": -1}")),
            "precision.max_skipped_in_a_row: expected at least 0, got -1");
}

TEST(Bf16, HasTwoNames) {
  for (const char* name : {"bf16", "bfloat16"}) {
    const std::string json =
        With(absl::StrCat("\"", name,
                          "\": {\"enabled\": true, "
                          "\"check_grad_overflow\": false}"));
    TESSERA_ASSERT_OK_AND_ASSIGN(const proto::Config config,
                                 ParseConfig(json, "f.json", 1));
    EXPECT_TRUE(config.bf16().enabled());
    EXPECT_FALSE(config.bf16().check_grad_overflow());
  }
  // Faults inside have the name that was written.
  EXPECT_EQ(FaultOf(With("\"bfloat16\": {\"enabled\": 1}")),
            "bfloat16.enabled: expected true or false, got 1");
  EXPECT_EQ(FaultOf(With("\"bfloat16\": {\"enabled\": true}, "
                         "\"bf16\": {\"enabled\": true}")),
            "bf16: the same key as 'bfloat16', whose value is at 1:61: write "
            "one of them");
}

// DeepSpeed's states of 16 bits, and what it asserts of them.
std::string Narrow(absl::string_view section, absl::string_view keys,
                   absl::string_view zero = "\"stage\": 2",
                   absl::string_view type = "AdamW",
                   absl::string_view params = "") {
  return With(absl::StrCat("\"", section, "\": {\"enabled\": true, ", keys,
                           "}, \"zero_optimization\": {", zero,
                           "}, \"optimizer\": {\"type\": \"", type,
                           "\", \"params\": {", params, "}}"));
}
constexpr char kMasters[] = "\"bf16_master_weights_and_grads\": true";
constexpr char kBoth[] =
    "\"bf16_master_weights_and_grads\": true, \"bf16_optimizer_states\": true";
constexpr char kFp16Masters[] = "\"fp16_master_weights_and_grads\": true";
constexpr char kOffloaded[] =
    "\"stage\": 2, \"offload_optimizer\": {\"device\": \"cpu\"}";

TEST(NarrowStates, AreWhatDeepSpeedMeans) {
  const auto resolved = [](const std::string& json, const char* note) {
    const absl::StatusOr<ConfigReport> report = ReadConfig(json, "f.json", 1);
    EXPECT_TRUE(report.ok() && report->faults.empty()) << json;
    TESSERA_EXPECT_OK(CheckRunnable(report->config));
    EXPECT_EQ(report->notes.size(), 1);
    if (!report->notes.empty()) {
      EXPECT_EQ(report->notes[0].path + ": " + report->notes[0].what, note);
    }
    // A completed configuration stays as it is.
    const auto again = ResolveConfig(report->config, 1);
    TESSERA_EXPECT_OK(again);
    if (again.ok()) {
      EXPECT_EQ(again->ShortDebugString(), report->config.ShortDebugString());
    }
    return absl::StrCat(report->config.data_types().grad_accum_dtype(), " ",
                        report->config.data_types().master_dtype(), " ",
                        report->config.optimizer().params().state_dtype());
  };
  constexpr char kAll[] =
      "bf16.bf16_master_weights_and_grads: gradients are kept in bf16, states "
      "in bf16, masters in bf16, rounded stochastically: no update is too "
      "small";
  EXPECT_EQ(resolved(Narrow("bf16", kBoth), kAll), "bf16 bf16 bf16");
  EXPECT_EQ(resolved(Narrow("bf16", kBoth, kOffloaded), kAll),
            "bf16 bf16 bf16");
  EXPECT_EQ(resolved(Narrow("bf16", kBoth, "\"stage\": 3", "Lion"), kAll),
            "bf16 bf16 bf16");
  EXPECT_EQ(
      resolved(Narrow("bf16", kMasters, kOffloaded),
               "bf16.bf16_master_weights_and_grads: gradients are kept in "
               "bf16, masters in bf16, rounded stochastically: no update is "
               "too small"),
      "bf16 bf16 fp32");
  EXPECT_EQ(
      resolved(Narrow("fp16", kFp16Masters, kOffloaded),
               "fp16.fp16_master_weights_and_grads: gradients are kept in "
               "fp16, masters in fp16, rounded stochastically: no update is "
               "too small"),
      "fp16 fp16 fp32");
  EXPECT_EQ(
      resolved(Narrow("bf16", kBoth, "\"stage\": 2", "LAMB"),
               "bf16.bf16_master_weights_and_grads: gradients are kept in "
               "bf16, states in bf16, masters in fp32, as they are of Lamb"),
      "bf16 fp32 bf16");
}

TEST(MasterDtype, IsOfTheDtypeThatIsEnabledAndOfSomeOptimizers) {
  const auto fault = [](const char* dtype, const char* section,
                        const char* type, const char* params = "") {
    return FaultOf(With(absl::StrCat(
        "\"", section, "\": {\"enabled\": true}, \"data_types\": ",
        "{\"master_dtype\": \"", dtype, "\"}, \"optimizer\": {\"type\": \"",
        type, "\", \"params\": {", params, "}}")));
  };
  EXPECT_EQ(fault("bf16", "bf16", "AdamW"), "OK");
  EXPECT_EQ(fault("torch.float16", "fp16", "SGD"), "OK");
  EXPECT_EQ(fault("fp32", "bf16", "Muon"), "OK");
  EXPECT_EQ(fault("fp16", "bf16", "AdamW"),
            "data_types.master_dtype: 'fp16' needs fp16.enabled");
  EXPECT_EQ(fault("bf16", "bf16", "Muon"),
            "data_types.master_dtype: expected fp32 of Muon, got 'bf16'");
  EXPECT_EQ(fault("bf16", "bf16", "AdamW", "\"ema_decay\": 0.9"),
            "data_types.master_dtype: expected fp32 with ema_decay, got "
            "'bf16'");
}

TEST(MasterDtype, RemaindersAreBesideBFloat16InMemory) {
  const auto fault = [](const std::string& section, const std::string& zero) {
    return FaultOf(With(absl::StrCat(
        section, "\"data_types\": {\"master_dtype\": \"FP32_remainder\"}, ",
        "\"zero_optimization\": {", zero, "}, ",
        "\"optimizer\": {\"type\": \"Muon\"}")));
  };
  const std::string bf16 = "\"bf16\": {\"enabled\": true}, ";
  EXPECT_EQ(fault(bf16, ""), "OK");
  constexpr char kNeeds[] =
      "data_types.master_dtype: 'fp32_remainder' needs bf16.enabled";
  EXPECT_EQ(fault("", ""), kNeeds);
  EXPECT_EQ(fault("\"fp16\": {\"enabled\": true}, ", ""), kNeeds);
  const auto message = [](const char* where) {
    return absl::StrCat(
        "data_types.master_dtype: zero_optimization.", where,
        ", but remainders and parameters stay in memory together: expected "
        "none, or other masters than 'fp32_remainder'");
  };
  EXPECT_EQ(fault(bf16, "\"offload_optimizer\": {\"device\": \"cpu\"}"),
            message("offload_optimizer.device is 'cpu'"));
  EXPECT_EQ(fault(bf16,
                  "\"stage\": 3, \"offload_param\": {\"device\": "
                  "\"nvme\", \"nvme_path\": \"/tmp\"}"),
            message("offload_param.device is 'nvme'"));
}

TEST(NarrowStates, NeedWhatDeepSpeedAsserts) {
  constexpr char kKey[] = "bf16.bf16_master_weights_and_grads: ";
  EXPECT_EQ(FaultOf(Narrow("bf16", kBoth, "\"stage\": 0")),
            absl::StrCat(kKey,
                         "expected stages 1 to 3, as in DeepSpeed, got "
                         "stage 0"));
  EXPECT_EQ(FaultOf(Narrow("bf16", "\"bf16_optimizer_states\": true")),
            "bf16.bf16_optimizer_states: needs bf16_master_weights_and_grads, "
            "as in DeepSpeed");
  EXPECT_EQ(FaultOf(Narrow("bf16", kMasters)),
            absl::StrCat(kKey,
                         "expected Adam or AdamW with offload_optimizer, as in "
                         "DeepSpeed unless bf16_optimizer_states is true, got "
                         "AdamW without it"));
  EXPECT_EQ(FaultOf(Narrow("bf16", kBoth, kOffloaded, "Lion")),
            absl::StrCat(kKey,
                         "expected Adam or AdamW with offload_optimizer, as in "
                         "DeepSpeed, got Lion"));
  EXPECT_EQ(FaultOf(Narrow("fp16", kFp16Masters)),
            "fp16.fp16_master_weights_and_grads: expected Adam or AdamW with "
            "offload_optimizer, as in DeepSpeed, got AdamW without it");
  EXPECT_EQ(FaultOf(With(absl::StrCat("\"bf16\": {", kBoth, "}"))),
            absl::StrCat(kKey, "needs bf16.enabled"));
  EXPECT_EQ(FaultOf(Narrow("bf16", kBoth, "\"stage\": 2", "AdamW",
                           "\"state_dtype\": \"8bit\"")),
            "bf16.bf16_optimizer_states: true, and "
            "optimizer.params.state_dtype of AdamW is 8bit");
  EXPECT_EQ(FaultOf(Narrow("bf16", kBoth, "\"stage\": 2", "Adafactor")),
            "bf16.bf16_optimizer_states: true, and "
            "optimizer.params.state_dtype of Adafactor is fp32");
}

TEST(Bf16, KeysOfFp16AreSentThere) {
  EXPECT_EQ(FaultOf(With("\"bf16\": {\"hysteresis\": 2}")),
            "bf16.hysteresis: unknown key, did you mean 'fp16.hysteresis'?");
}

TEST(Precision, OnlyBf16AndAutocastGoTogether) {
  const auto fault = [](const char* bf16, const char* fp16,
                        const char* autocast) {
    return FaultOf(With(absl::StrCat(
        "\"bf16\": {\"enabled\": ", bf16, "}, \"fp16\": {\"enabled\": ", fp16,
        "}, \"torch_autocast\": {\"enabled\": ", autocast, "}")));
  };
  EXPECT_EQ(fault("false", "false", "false"), "OK");
  EXPECT_EQ(fault("true", "false", "false"), "OK");
  EXPECT_EQ(fault("false", "true", "false"), "OK");
  EXPECT_EQ(fault("false", "false", "true"), "OK");
  EXPECT_EQ(fault("true", "true", "false"),
            "fp16.enabled: bf16.enabled is true too: enable one of the two");
  EXPECT_EQ(fault("true", "false", "true"), "OK");
  EXPECT_EQ(fault("false", "true", "true"),
            "torch_autocast.enabled: fp16.enabled is true too: enable one of "
            "the two");
}

TEST(TorchAutocast, HasTwoKeys) {
  const auto fault = [](absl::string_view member) {
    return FaultOf(With(absl::StrCat("\"torch_autocast\": {", member, "}")));
  };
  EXPECT_EQ(fault("\"dtype\": \"bfloat16\""), "OK");
  EXPECT_EQ(fault("\"dtype\": \"float16\""), "OK");
  EXPECT_EQ(fault("\"dtype\": \"fp8\""),
            "torch_autocast.dtype: expected bfloat16 or float16, got 'fp8'");
  EXPECT_EQ(fault("\"safe_modules\": []"),
            "torch_autocast.safe_modules: unknown key");
}

TEST(GradientDtypes, OfCommunication) {
  const auto parse = [](absl::string_view value) {
    return ParseConfig(
        With(absl::StrCat("\"communication_data_type\": ", value)), "f.json",
        1);
  };
  for (const auto& [written, dtype] :
       {std::pair("\"fp16\"", "fp16"), std::pair("\"BF16\"", "bf16"),
        std::pair("\"Fp32\"", "fp32")}) {
    TESSERA_ASSERT_OK_AND_ASSIGN(const proto::Config config, parse(written));
    EXPECT_EQ(config.communication_data_type(), dtype);
  }
  TESSERA_ASSERT_OK_AND_ASSIGN(const proto::Config absent, parse("null"));
  EXPECT_FALSE(absent.has_communication_data_type());
  EXPECT_THAT(parse("\"float32\""),
              StatusIs(StatusCode::kInvalidArgument,
                       HasSubstr("communication_data_type: expected fp16, bf16 "
                                 "or fp32, got 'float32'")));
  EXPECT_THAT(parse("\"\""), StatusIs(StatusCode::kInvalidArgument));
}

TEST(GradientDtypes, OfAccumulation) {
  const auto fault = [](absl::string_view value) {
    return FaultOf(With(
        absl::StrCat("\"data_types\": {\"grad_accum_dtype\": ", value, "}")));
  };
  EXPECT_EQ(fault("null"), "OK");
  EXPECT_EQ(fault("\"fp32\""), "OK");
  EXPECT_EQ(fault("\"FP32\""), "OK");
  EXPECT_EQ(fault("\"fp64\""),
            "data_types.grad_accum_dtype: expected fp32, bf16 or fp16, got "
            "'fp64'");
  EXPECT_EQ(fault("\"bf16\""), "OK");
}

TEST(GradientDtypes, ParametersHaveTheEnabledOne) {
  const auto fault = [](absl::string_view dtype, absl::string_view more) {
    return FaultOf(With(absl::StrCat("\"data_types\": {\"param_dtype\": \"",
                                     dtype, "\"}", more)));
  };
  EXPECT_EQ(fault("fp32", ""), "OK");
  EXPECT_EQ(fault("BF16", ", \"bf16\": {\"enabled\": true}"), "OK");
  EXPECT_EQ(fault("bf16", ""),
            "data_types.param_dtype: expected fp32, which bf16.enabled and "
            "fp16.enabled say, got 'bf16'");
}

TEST(Precision, AllKeys) {
  TESSERA_ASSERT_OK_AND_ASSIGN(const proto::Config config,
                               ParseConfig(With(R"("precision": {
        "fp32_norms": true, "fp32_classes": ["Router"],
        "cast_inputs": false})"),
                                           "f.json", 1));
  EXPECT_EQ(config.precision().ShortDebugString(),
            "fp32_norms: true "
            "fp32_classes: \"Router\" cast_inputs: false "
            "libtorch_exact: false libtorch_fused: false "
            "max_skipped_in_a_row: 50");
}

TEST(Precision, FaultsAreNamed) {
  const auto fault = [](absl::string_view member) {
    return FaultOf(With(absl::StrCat("\"precision\": {", member, "}")));
  };
  EXPECT_EQ(FaultOf(With("\"data_types\": {\"buffer_dtype\": \"fp64\"}")),
            "data_types.buffer_dtype: expected fp32, bf16 or fp16, got "
            "'fp64'");
  EXPECT_EQ(fault("\"fp32_classes\": [\"\"]"),
            "precision.fp32_classes[0]: expected a name, got ''");
  EXPECT_EQ(FaultOf(With("\"fp16\": {\"auto_cast\": true}, "
                         "\"precision\": {\"cast_inputs\": false}")),
            "precision.cast_inputs: false contradicts fp16.auto_cast, which is "
            "true");
}

}  // namespace
}  // namespace tessera
