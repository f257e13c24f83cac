// Parameters of a safetensors file, read by each rank in part: the bits of the
// file, and training goes on as if the model had been made with them.
#include <torch/torch.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <string>
#include <tuple>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/status.h"
#include "base/status_matchers.h"
#include "checkpoint/safetensors.h"
#include "checkpoint/write_safetensors_test_util.h"
#include "comm/world/world.h"
#include "engine/engine.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/checkpoint/safetensors_load_test_util.h"
#include "tests/support/rank_pool.h"
#include "tests/support/temp_folder.h"
#include "tests/support/trainee.h"
#include "tests/support/training.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;

// Returns the dictionary of a model, with all its names.
StateDict DictOf(const std::string& model) {
  torch::manual_seed(kFileSeed);
  const auto module = MakeTestModel(model);
  StateDict dict;
  for (const auto& p : module->named_parameters()) {
    dict.emplace_back(p.key(), p.value().detach());
  }
  for (const auto& b : module->named_buffers()) {
    dict.emplace_back(b.key(), b.value());
  }
  return dict;
}

// Loads, and trains two steps. Masters and working copies are then compared
// with the oracle's, and right after the load with the file's.
TESSERA_RANK_FUNCTION(LoadAndTrain) {
  const auto [path, spec] = Split(args);
  TESSERA_ASSIGN_OR_RETURN(Trainee t,
                           Trainee::Make(spec, world.communicator()));
  TESSERA_RETURN_IF_ERROR(t.engine->LoadSafetensors(path).status());
  TESSERA_ASSIGN_OR_RETURN(const auto file, Safetensors::Open(path));
  TESSERA_ASSIGN_OR_RETURN(const StateDict dict, t.engine->FullStateDict());
  for (const auto& [name, value] : dict) {
    const SafetensorsTensor& source = *file->Find(name);
    at::Tensor expected = torch::empty(source.sizes, DtypeOf(source));
    at::Tensor flat = expected.view(-1);
    if (expected.is_complex()) flat = at::view_as_real(flat).view(-1);
    TESSERA_RETURN_IF_ERROR(file->Read(source, {0, flat.numel()}, flat));
    if (!value.equal(expected.to(value.scalar_type()))) {
      return absl::StrCat(name, " is not the file's");
    }
  }
  for (const auto& p : t.model->named_parameters()) {
    const auto working = t.engine->Parameter(p.key());
    if (!working.ok()) continue;  // the second name of a tied one
    TESSERA_ASSIGN_OR_RETURN(const at::Tensor master,
                             t.engine->Master(p.key()));
    if (!working->equal(master.to(working->scalar_type()))) {
      return absl::StrCat(p.key(), " was not published");
    }
  }
  TESSERA_RETURN_IF_ERROR(t.TrainStep(0));
  TESSERA_RETURN_IF_ERROR(t.TrainStep(1));
  return t.Finish();
}

// World size, stage, dtype, how units are gathered.
class LoadTest : public ::testing::TestWithParam<
                     std::tuple<int, int, std::string, std::string>> {};
INSTANTIATE_TEST_SUITE_P(All, LoadTest,
                         ::testing::Combine(::testing::Values(1, 2, 3),
                                            ::testing::Values(0, 1, 2, 3),
                                            ::testing::Values("fp32", "bf16"),
                                            ::testing::Values("auto")),
                         [](const auto& info) {
                           return absl::StrCat("World", std::get<0>(info.param),
                                               "Stage", std::get<1>(info.param),
                                               std::get<2>(info.param));
                         });
INSTANTIATE_TEST_SUITE_P(Collective, LoadTest,
                         ::testing::Combine(::testing::Values(2),
                                            ::testing::Values(3),
                                            ::testing::Values("fp32", "bf16"),
                                            ::testing::Values("off")),
                         [](const auto& info) {
                           return std::get<2>(info.param);
                         });

TEST_P(LoadTest, TrainsAsIfItHadBeenMadeSo) {
  const auto& [world_size, stage, dtype, gathers] = GetParam();
  const TempFolder folder;
  // channels_last and buffers; complex; two names; places in one storage;
  // parameters that require no gradient, integers too; two dtypes; persistent
  // ones. Where ranks may share a copy, a case runs half of them, and its
  // neighbours the other half.
  int sum = world_size + stage + (dtype == "fp32" ? 0 : 1);
  for (const char* model : {"ConvNorm", "Complex", "Tied", "SharedStorage",
                            "Frozen", "NeverTrained", "MixedDtype", "Views"}) {
    if (sum++ % 2 != 0 && gathers == "auto") continue;
    TrainingSpec spec;
    spec.model = model;
    spec.stage = stage;
    spec.dtype = dtype;
    spec.fp32_norms = dtype != "fp32";
    spec.shared = spec.served = gathers;
    if (spec.model == "Views") spec.param_persistence_threshold = 100;
    if (dtype != "fp32" &&
        (spec.model == "Complex" || spec.model == "MixedDtype")) {
      continue;
    }
    SCOPED_TRACE(spec.ToText());
    const std::string path = folder / absl::StrCat(model, ".safetensors");
    TESSERA_ASSERT_OK(WriteSafetensors(path, DictOf(model)));
    OracleOptions options = OracleOptionsOf(spec, world_size);
    options.model_seed = kFileSeed;
    Oracle oracle([&] { return MakeTestModel(spec.model); }, options);
    oracle.TrainStep(LossOf(0));
    oracle.TrainStep(LossOf(1));
    ExpectParameters(RunOnRanks(world_size, "LoadAndTrain",
                                absl::StrCat(path, "|", spec.ToText())),
                     oracle);
  }
}

// "read, total of this model, what this rank may read".
TESSERA_RANK_FUNCTION(CountBytes) {
  const auto [path, spec] = Split(args);
  TESSERA_ASSIGN_OR_RETURN(Trainee t,
                           Trainee::Make(spec, world.communicator()));
  TESSERA_ASSIGN_OR_RETURN(const LoadSafetensorsReport report,
                           t.engine->LoadSafetensors(path));
  // Two states per owned element.
  return absl::StrCat(report.bytes_read, " ",
                      t.engine->state_bytes().optimizer / 2);
}

TEST(LoadBytesTest, EachRankReadsItsPart) {
  const TempFolder folder;
  TESSERA_ASSERT_OK(WriteSafetensors(folder / "m.safetensors", DictOf("Mlp")));
  int64_t total = 0;
  for (const auto& [name, value] : DictOf("Mlp")) {
    total += static_cast<int64_t>(value.nbytes());
  }
  for (const int world_size : {2, 3}) {
    for (const int stage : {1, 3}) {
      TrainingSpec spec;
      spec.stage = stage;
      int64_t sum = 0;
      for (const std::string& answer :
           RunOnRanks(world_size, "CountBytes",
                      absl::StrCat(folder / "m.safetensors|", spec.ToText()))) {
        const std::pair<std::string, std::string> numbers =
            absl::StrSplit(answer, ' ');
        int64_t read = 0, owned = 0;
        ASSERT_TRUE(absl::SimpleAtoi(numbers.first, &read)) << answer;
        ASSERT_TRUE(absl::SimpleAtoi(numbers.second, &owned)) << answer;
        EXPECT_LE(read, owned);
        sum += read;
      }
      // No byte is read twice.
      EXPECT_EQ(sum, total);
    }
  }
}

// Each way to say names, and each fault; nothing is changed by the latter.
TESSERA_RANK_FUNCTION(LoadBadly) {
  const auto split = Split(args);
  const std::string& path = split.first;
  const TrainingSpec& spec = split.second;
  TESSERA_ASSIGN_OR_RETURN(Trainee t,
                           Trainee::Make(spec, world.communicator()));
  TESSERA_ASSIGN_OR_RETURN(const StateDict before, t.engine->FullStateDict());
  std::string said;
  const auto say = [&](const std::string& name,
                       LoadSafetensorsOptions options) {
    const auto report = t.engine->LoadSafetensors(path + name, options);
    absl::StrAppend(&said, report.status().ToString(), "\n");
  };
  const bool last = world.rank() == world.world_size() - 1;
  say(last ? "none" : "good", {});
  say("renamed", {});
  say("shape", {});
  say("integers", {});
  say("float4", {});
  say(last ? "bare" : "good", {.strict = false});
  LoadSafetensorsOptions throws;
  throws.file_name = [&](absl::string_view name) -> std::string {
    if (last) throw std::runtime_error("no such name in my table");
    return std::string(name);
  };
  say("good", throws);
  // Cut off after it was opened, on one rank.
  LoadSafetensorsOptions cuts;
  const std::string own = absl::StrCat("rank", world.rank());
  cuts.file_name = [&](absl::string_view name) {
    if (last) fs::resize_file(path + own, fs::file_size(path + "empty"));
    return std::string(name);
  };
  say(own, cuts);
  // Other values under the same header, on one rank, as where a file is
  // replaced while ranks open it; and in the place of what it has opened.
  say(absl::StrCat("values", world.rank()), {});
  LoadSafetensorsOptions overwrites;
  const std::string again = absl::StrCat("again", world.rank());
  overwrites.file_name = [&](absl::string_view name) {
    if (last) std::fstream(path + again, std::ios::in | std::ios::out) << "x";
    return std::string(name);
  };
  say(again, overwrites);
  TESSERA_ASSIGN_OR_RETURN(const StateDict after, t.engine->FullStateDict());
  for (size_t i = 0; i < before.size(); ++i) {
    if (!after[i].second.equal(before[i].second)) {
      absl::StrAppend(&said, before[i].first, " has changed\n");
    }
  }
  TESSERA_RETURN_IF_ERROR(t.TrainStep(0));
  return said;
}

TEST(LoadMisuseTest, IsNamedOnAllRanksAndChangesNothing) {
  const TempFolder folder;
  const auto write = [&](const std::string& name, const StateDict& dict) {
    TESSERA_EXPECT_OK(WriteSafetensors(folder / name, dict));
  };
  const StateDict good = DictOf("Mlp");
  write("good", good);
  for (const int r : {0, 1}) write(absl::StrCat("rank", r), good);
  write("empty", {});
  StateDict dict = good;
  dict[0].second = dict[0].second + 1;
  write("values0", good);
  write("values1", dict);
  dict = good;
  dict[0].first += "s";
  write("renamed", dict);
  dict = good;
  dict[0].second = dict[0].second.reshape(-1);
  write("shape", dict);
  dict[0].second = good[0].second.to(torch::kInt);
  write("integers", dict);
  write("bare", {good[0]});
  const std::string json = absl::StrCat(
      "{\"", good[0].first,
      "\":{\"dtype\":\"F4\",\"shape\":[2],\"data_offsets\":[0,1]}}");
  std::ofstream(folder / "float4")
      << static_cast<char>(json.size()) << std::string(7, '\0') << json << "x";
  for (const int stage : {1, 3}) {
    for (const char* name : {"again0", "again1"}) {
      write(name, good);  // long ago
      fs::last_write_time(folder / name, fs::file_time_type::clock::now() -
                                             std::chrono::hours(1));
    }
    TrainingSpec spec;
    spec.stage = stage;
    const std::vector<std::string> said = RunOnRanks(
        2, "LoadBadly", absl::StrCat(folder / "", "|", spec.ToText()));
    const std::string name = good[0].first;
    EXPECT_THAT(
        said,
        Each(AllOf(
            HasSubstr("NOT_FOUND: [Engine::LoadSafetensors] rank 1: "),
            HasSubstr(absl::StrCat("has no '", name, "' of the module (is it '",
                                   name, "s'?); map names by")),
            HasSubstr(
                absl::StrCat("the module has no '", name, "s' of the file")),
            HasSubstr(absl::StrCat("tensor '", name, "': expected sizes [")),
            HasSubstr("expected floating-point numbers for"),
            HasSubstr("dtype F4 is none that libtorch has"),
            HasSubstr("the safetensors file, or its options, differs between "
                      "rank 0 ("),
            HasSubstr("rank 1: Engine::LoadSafetensors: no such name in my"),
            HasSubstr("DATA_LOSS: [Engine::LoadSafetensors] rank 1: "))));
    EXPECT_THAT(said, Each(AllOf(HasSubstr("rank1: tensor '"),
                                 HasSubstr("it was cut off while it was read"),
                                 HasSubstr("bytes in 1 files, CRC32C"),
                                 HasSubstr("ABORTED: [Engine::LoadSafetensors] "
                                           "rank 1: "),
                                 HasSubstr("again1: was written to since it"),
                                 Not(HasSubstr("has changed")))));
    EXPECT_EQ(said[0], said[1]);
    TESSERA_ASSERT_OK(WriteSafetensors(folder / "rank1", good));
  }
}

}  // namespace
}  // namespace tessera
