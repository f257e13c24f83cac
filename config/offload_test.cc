// Offload as DeepSpeed's files ask for it.
#include <string>
#include <utility>
#include <vector>

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
using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::string With(absl::string_view members) {
  return Json(absl::StrCat("\"train_batch_size\": 8, ", members));
}

std::string ZeroFault(absl::string_view members) {
  return FaultOf(With(absl::StrCat("\"zero_optimization\": {", members, "}")));
}

// Reads a configuration with these members of zero_optimization.
ConfigReport ReportOf(absl::string_view members) {
  const absl::StatusOr<ConfigReport> report =
      ReadConfig(With(absl::StrCat("\"zero_optimization\": {", members, "}")),
                 "f.json", 1);
  EXPECT_TRUE(report.ok()) << report.status();
  return report.ok() ? *report : ConfigReport();
}

std::vector<std::string> NotesOf(const ConfigReport& report) {
  EXPECT_TRUE(report.faults.empty()) << FormatFault(report.faults[0], "");
  std::vector<std::string> notes;
  for (const ConfigFault& note : report.notes) {
    notes.push_back(absl::StrCat(note.path, ": ", note.what));
  }
  return notes;
}

TEST(Offload, HasRules) {
  const std::pair<const char*, const char*> cases[] = {
      {"\"stage\": 2, \"offload_param\": {\"device\": \"none\"}", "OK"},
      {"\"stage\": 3, \"offload_param\": {\"device\": \"nvme\"}",
       "zero_optimization.offload_param.nvme_path: missing: device nvme needs "
       "a folder"},
      {"\"stage\": 3, \"offload_param\": {\"device\": \"nvme\", "
       "\"nvme_path\": \"/tmp\"}",
       "OK"},
      {"\"stage\": 2, \"offload_optimizer\": {\"ratio\": 0.5}",
       "zero_optimization.offload_optimizer.ratio: expected 1 at stage 2, got "
       "0.5: less needs stage 3"},
      {"\"offload_optimizer\": {\"device\": \"CPU\"}",
       "zero_optimization.offload_optimizer.device: expected none, cpu, nvme "
       "or auto, got 'CPU', did you mean 'cpu'?"},
      {"\"offload_optimizer\": {\"device\": \"auto\"}, \"offload_param\": "
       "{\"device\": \"auto\"}",
       "OK"},
      {"\"offload_optimizer\": true",
       "zero_optimization.offload_optimizer: expected an object, got true"},
      {"\"offload_optimizer\": null, \"offload_param\": null", "OK"},
      {"\"offload_optimizer\": {\"ratio\": 1.5}",
       "zero_optimization.offload_optimizer.ratio: expected 0 to 1, got 1.5"},
  };
  for (const auto& [members, fault] : cases) {
    EXPECT_EQ(ZeroFault(members), fault) << members;
  }
  EXPECT_EQ(FaultOf(With("\"aio\": {\"use_gds\": true}")),
            "aio.use_gds: expected false, got true: there is no GPUDirect "
            "Storage in this version");
}

// DeepSpeed's stages 0 to 2 ignore these, too.
TEST(Offload, BelowStage3IsNoted) {
  for (const char* device : {"cpu", "nvme"}) {
    const ConfigReport report = ReportOf(absl::StrCat(
        "\"stage\": 2, \"offload_param\": {\"device\": \"", device, "\"}"));
    EXPECT_THAT(NotesOf(report),
                ElementsAre("zero_optimization.offload_param.device: has no "
                            "effect at stage 2: parameters are offloaded at "
                            "stage 3 only"));
    TESSERA_EXPECT_OK(CheckRunnable(report.config));
  }
  TESSERA_EXPECT_OK(CheckRunnable(
      ReportOf("\"stage\": 1, \"cpu_offload_param\": true").config));
  const ConfigReport nvme =
      ReportOf("\"stage\": 2, \"offload_optimizer\": {\"device\": \"nvme\"}");
  EXPECT_THAT(NotesOf(nvme),
              ElementsAre("zero_optimization.offload_optimizer.device: nvme "
                          "counts as cpu at stage 2, as in DeepSpeed: it needs "
                          "stage 3"));
  TESSERA_EXPECT_OK(CheckRunnable(nvme.config));
}

// The module may be on the CPU; Engine::Create checks where it is.
TEST(Offload, ToTheCpuIsAccepted) {
  for (const char* members :
       {"\"stage\": 2, \"offload_optimizer\": {\"device\": \"cpu\"}",
        "\"stage\": 3, \"offload_optimizer\": {\"device\": \"cpu\"}, "
        "\"offload_param\": {\"device\": \"cpu\"}",
        "\"stage\": 2, \"cpu_offload\": true"}) {
    TESSERA_EXPECT_OK(CheckRunnable(ReportOf(members).config)) << members;
  }
}

TEST(Offload, ToNvme) {
  const auto at_stage_3 = [](const char* section) {
    return ReportOf(
        absl::StrCat("\"stage\": 3, \"", section,
                     "\": {\"device\": \"nvme\", \"nvme_path\": \"/tmp\"}"));
  };
  const ConfigReport states = at_stage_3("offload_optimizer");
  EXPECT_THAT(NotesOf(states), ElementsAre());
  TESSERA_EXPECT_OK(CheckRunnable(states.config));
  EXPECT_EQ(states.config.aio().queue_depth(), 8);  // as without a section
  EXPECT_EQ(states.config.sharding().offload().slice_numel(), 1 << 20);
  TESSERA_EXPECT_OK(CheckRunnable(at_stage_3("offload_param").config));
}

TEST(Offload, OfActivations) {
  const auto fault = [](absl::string_view members) {
    return FaultOf(
        With(absl::StrCat("\"activation_checkpointing\": {", members, "}")));
  };
  EXPECT_EQ(fault("\"offload\": \"nvme\""),
            "activation_checkpointing.nvme_path: expected a folder, for "
            "offload \"nvme\"");
  EXPECT_EQ(fault("\"policy\": \"keep\""),
            "activation_checkpointing.policy: \"keep\" is for offload \"cpu\" "
            "or \"nvme\", and that is \"none\": leave "
            "activation_checkpointing out");
  EXPECT_EQ(fault("\"cpu_checkpointing\": true, \"offload\": \"nvme\", "
                  "\"nvme_path\": \"/tmp\""),
            "activation_checkpointing.cpu_checkpointing: expected false with "
            "offload \"nvme\", got true");
  EXPECT_EQ(fault("\"cpu_checkpointing\": true, \"offload\": \"none\""),
            "activation_checkpointing.cpu_checkpointing: expected false with "
            "offload \"none\", got true");
  const auto read = ReadConfig(
      With("\"activation_checkpointing\": {\"cpu_checkpointing\": true}"),
      "f.json", 1);
  TESSERA_ASSERT_OK(read);
  EXPECT_THAT(NotesOf(*read), ElementsAre());
  EXPECT_EQ(read->config.activation_checkpointing().offload(), "cpu");
}

TEST(Offload, HasRulesForTheDisk) {
  EXPECT_EQ(FaultOf(With("\"aio\": {\"block_size\": 1000}")),
            "aio.block_size: expected a multiple of 4096, got 1000");
  EXPECT_EQ(
      FaultOf(With("\"sharding\": {\"offload\": {\"slice_numel\": 5000}}")),
      "sharding.offload.slice_numel: expected a multiple of 4096, got 5000");
  // 64 elements of 8 bits are 68 bytes, and slices begin at a disk's blocks.
  const auto fault = [](const char* device, int slice_numel) {
    return FaultOf(With(absl::StrCat(
        "\"optimizer\": {\"type\": \"Adam\", \"params\": "
        "{\"state_dtype\": \"8bit\"}}, \"sharding\": {\"offload\": "
        "{\"slice_numel\": ",
        slice_numel,
        "}}, \"zero_optimization\": {\"stage\": 3, \"offload_optimizer\": "
        "{\"device\": \"",
        device, "\", \"nvme_path\": \"/tmp\"}}")));
  };
  EXPECT_EQ(fault("cpu", 4096), "OK");
  EXPECT_EQ(fault("nvme", 65536), "OK");
  EXPECT_EQ(fault("nvme", 4096 * 15),
            "sharding.offload.slice_numel: expected a multiple of 65536 with "
            "state_dtype 8bit on nvme, got 61440");
}

}  // namespace
}  // namespace tessera
