// Safetensors files that all ranks write at once: the values of the state dict,
// whatever the stage, and another program's names and layouts both ways.
#include <torch/torch.h>

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/status.h"
#include "checkpoint/safetensors.h"
#include "comm/world/world.h"
#include "engine/engine.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/rank_pool.h"
#include "tests/support/temp_folder.h"
#include "tests/support/trainee.h"
#include "tests/support/training.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;

// The text is "<stage>\n<folder>".
struct SaveArgs {
  explicit SaveArgs(absl::string_view text) {
    const std::vector<std::string> lines = absl::StrSplit(text, '\n');
    spec.model = "ConvNorm";  // channels, buffers of integers
    spec.stage = lines.at(0)[0] - '0';
    dir = lines.at(1);
  }
  TrainingSpec spec;
  std::string dir;
};

// Returns what of a file differs from `expected`, by Tessera's names, or "".
absl::StatusOr<std::string> Difference(const std::string& dir,
                                       const StateDict& expected,
                                       const NameMap& names, bool bf16) {
  TESSERA_ASSIGN_OR_RETURN(const auto file, Safetensors::Open(dir));
  if (file->tensors().size() != expected.size()) {
    return absl::StrCat(file->tensors().size(), " tensors, expected ",
                        expected.size());
  }
  for (const auto& [name, value] : expected) {
    const NameMap::Name theirs = names.Theirs(name);
    const SafetensorsTensor* const tensor = file->Find(theirs.name);
    if (tensor == nullptr) return absl::StrCat("no ", theirs.name);
    const bool rounds = bf16 && value.is_floating_point();
    if (rounds != (DtypeOf(*tensor) == at::kBFloat16))
      return "dtype of " + name;
    const at::Tensor there =
        at::empty({value.numel()}, value.options().dtype(DtypeOf(*tensor)));
    TESSERA_RETURN_IF_ERROR(file->Read(*tensor, {0, value.numel()}, there));
    const at::Tensor want = theirs.transposed ? value.t() : value;
    if (want.sizes() != at::IntArrayRef(tensor->sizes) ||
        !at::equal(there.view(want.sizes()), want.to(DtypeOf(*tensor)))) {
      return "other values of " + name;
    }
  }
  return "";
}

constexpr char kRules[] = R"(
head.weight    classifier.kernel   transposed
norm1.*        bn.*
)";

TESSERA_RANK_FUNCTION(SaveAndCompare) {
  const SaveArgs a(args);
  TESSERA_ASSIGN_OR_RETURN(Trainee trainee,
                           Trainee::Make(a.spec, world.communicator()));
  Engine& engine = *trainee.engine;
  TESSERA_RETURN_IF_ERROR(trainee.TrainStep(0));
  TESSERA_ASSIGN_OR_RETURN(const StateDict state, engine.FullStateDict());
  SaveSafetensorsOptions options;
  TESSERA_RETURN_IF_ERROR(engine.SaveSafetensors(a.dir + "/plain", options));
  TESSERA_ASSIGN_OR_RETURN(options.names, NameMap::Parse(kRules, "rules"));
  TESSERA_RETURN_IF_ERROR(engine.SaveSafetensors(a.dir + "/theirs", options));
  options.dtype = "bf16";
  options.max_file_bytes = 2000;
  TESSERA_RETURN_IF_ERROR(engine.SaveSafetensors(a.dir + "/bf16", options));
  const absl::Status again = engine.SaveSafetensors(a.dir + "/plain", options);
  TESSERA_ASSIGN_OR_RETURN(std::string difference,
                           Difference(a.dir + "/plain", state, {}, false));
  for (const bool bf16 : {false, true}) {
    TESSERA_ASSIGN_OR_RETURN(const std::string more,
                             Difference(a.dir + (bf16 ? "/bf16" : "/theirs"),
                                        state, options.names, bf16));
    difference += more;
  }
  // The file is loaded into other values.
  TESSERA_RETURN_IF_ERROR(trainee.TrainStep(1));
  LoadSafetensorsOptions load;
  load.names = options.names;
  TESSERA_RETURN_IF_ERROR(
      engine.LoadSafetensors(a.dir + "/theirs", load).status());
  TESSERA_ASSIGN_OR_RETURN(const StateDict loaded, engine.FullStateDict());
  for (size_t i = 0; i < state.size(); ++i) {
    if (!at::equal(state[i].second, loaded[i].second)) {
      difference += "not loaded: " + state[i].first;
    }
  }
  // Statistics of each rank's own batches: the files have rank 0's.
  if (world.rank() != 0) difference.clear();
  return absl::StrCat("difference: '", difference, "'; ", again.ToString());
}

TEST(SafetensorsSaveTest, HasTheValuesOfTheStateDictAtEveryStage) {
  for (int stage = 0; stage < 4; ++stage) {
    const TempFolder folder;
    EXPECT_THAT(
        RunOnRanks(2, "SaveAndCompare",
                   absl::StrCat(stage, "\n", folder / "out")),
        Each(AllOf(HasSubstr("difference: '';"), HasSubstr("ALREADY_EXISTS"),
                   HasSubstr("holds model.safetensors"))))
        << "stage " << stage;
  }
}

}  // namespace
}  // namespace tessera
