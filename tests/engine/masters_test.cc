// Tests that what a user writes into 16-bit parameters goes into their float32
// masters, and nothing else of these changes; Close gives the masters back;
// buffers of another dtype come back in their own.
#include <torch/torch.h>

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/status.h"
#include "comm/world/world.h"
#include "engine/engine.h"
#include "gmock/gmock.h"
#include "sharding/flat/use.h"
#include "tests/models/models.h"
#include "tests/support/rank_pool.h"
#include "tests/support/trainee.h"
#include "tests/support/training.h"
#include "verify/oracle.h"
#include "verify/oracle_step.h"

namespace tessera {
namespace {

using ::testing::Each;

at::Tensor ParameterOf(const torch::nn::Module& module, const char* name) {
  return module.named_parameters()[name];
}
at::Tensor Weight(const torch::nn::Module& module) {
  return ParameterOf(module, "blocks.1.up.weight");  // [29, 13]
}

// A write that all ranks make, without gradients.
using Write = std::function<void(const torch::nn::Module&)>;

const std::map<std::string, Write>& Writes() {
  using Module = torch::nn::Module;
  static const auto* all = new std::map<std::string, Write>{
      {"normal",
       [](const Module& m) {
         torch::manual_seed(77);
         torch::nn::init::normal_(Weight(m));
         torch::nn::init::zeros_(ParameterOf(m, "blocks.2.up.bias"));
       }},
      {"copy",
       [](const Module& m) {
         Weight(m).copy_(torch::linspace(-1, 1, 29 * 13).view({29, 13}));
       }},
      {"mul",
       [](const Module& m) {
         Weight(m).mul_(1.5);
         ParameterOf(m, "out.bias").add_(0.25);
       }},
      {"element", [](const Module& m) { Weight(m)[2][3] = 0.5; }},
      {"rows", [](const Module& m) { Weight(m).narrow(0, 17, 3).mul_(2); }},
      // Their working copies are the same, to the bit.
      {"nothing",
       [](const Module& m) {
         for (at::Tensor& p : m.parameters()) p.mul_(1).clamp_(-100, 100);
       }},
      {"set_data",
       [](const Module& m) {
         Weight(m).set_data(torch::full({29, 13}, 0.3, Weight(m).options()));
       }},
      {"vector",
       [](const Module& m) {
         const auto parameters = m.parameters();
         const at::Tensor vector =
             torch::nn::utils::parameters_to_vector(parameters);
         torch::nn::utils::vector_to_parameters(vector * 1.25, parameters);
       }},
      {"pointer",
       [](const Module& m) {
         const Use pin(Weight(m));
         auto* const bits =
             static_cast<uint16_t*>(Weight(m).mutable_data_ptr());
         bits[200] = 0x3c00;  // 1 in float16, 0.0078125 in bfloat16
       }},
  };
  return *all;
}

// Parameters that are looked at, written and not.
const std::vector<std::string> kNoted = {"blocks.1.up.weight",
                                         "blocks.1.up.bias", "blocks.2.up.bias",
                                         "blocks.1.norm.weight", "out.bias"};

void AddMasters(const std::string& when, const std::string& name,
                const at::Tensor& master, Record* record) {
  record->push_back(absl::StrCat(when, " ", name, " ", PrintOf(master)));
}

// args: "<write> <spec>". Returns masters and working copies after a write
// before the first step, after one before the second, and at the end; then the
// closed module.
TESSERA_RANK_FUNCTION(WriteAndTrain) {
  const std::vector<std::string> words =
      absl::StrSplit(args, absl::MaxSplits(' ', 1));
  const TrainingSpec spec = TrainingSpec::FromText(words.at(1));
  TESSERA_ASSIGN_OR_RETURN(Trainee t,
                           Trainee::Make(spec, world.communicator()));
  Record record;
  const auto note = [&](const std::string& when) -> absl::Status {
    for (const std::string& name : kNoted) {
      TESSERA_ASSIGN_OR_RETURN(at::Tensor master, t.engine->Master(name));
      AddMasters(when, name, master, &record);
      TESSERA_ASSIGN_OR_RETURN(at::Tensor value, t.engine->Parameter(name));
      record.push_back(ParameterLine(name, value));
    }
    return absl::OkStatus();
  };
  for (int step = 0; step < 2; ++step) {
    {
      torch::NoGradGuard no_grad;
      Writes().at(words.at(0))(*t.model);
    }
    TESSERA_RETURN_IF_ERROR(note(absl::StrCat("written ", step)));
    TESSERA_RETURN_IF_ERROR(t.TrainStep(step));
  }
  TESSERA_RETURN_IF_ERROR(note("trained"));
  TESSERA_RETURN_IF_ERROR(t.engine->Close());
  for (const auto& p : t.model->named_parameters()) {
    AddMasters("closed", p.key(), p.value(), &record);
  }
  return ToText(record);
}

// A master rounded as working copies are.
at::Tensor Rounded(const at::Tensor& master, at::ScalarType dtype,
                   bool ties_away) {
  return ties_away && dtype == at::kBFloat16 ? OracleRoundTiesAway(master)
                                             : master.to(dtype);
}

// Applies the write to the oracle: an element of a master becomes the working
// one if that is no longer the master, rounded.
void WriteToOracle(const Write& write, int world_size, bool ties_away,
                   Oracle* oracle) {
  torch::NoGradGuard no_grad;
  for (int r = 0; r < world_size; ++r) write(oracle->module(r));
  for (const std::string& name : oracle->parameter_names()) {
    const at::Tensor working = oracle->parameter(name);
    const at::Tensor master = oracle->master(name);
    const at::Tensor same =
        Rounded(master, working.scalar_type(), ties_away).eq(working);
    master.copy_(torch::where(same, master, working.to(master.dtype())));
  }
}

Record WriteAndTrainWithOracle(const Write& write, const TrainingSpec& spec,
                               int world_size) {
  Oracle oracle([&] { return MakeTestModel(spec.model); },
                OracleOptionsOf(spec, world_size));
  Record record;
  const auto note = [&](const std::string& when) {
    for (const std::string& name : kNoted) {
      AddMasters(when, name, oracle.master(name), &record);
      record.push_back(ParameterLine(name, oracle.parameter(name)));
    }
  };
  for (int step = 0; step < 2; ++step) {
    WriteToOracle(write, world_size, spec.remainder_masters, &oracle);
    note(absl::StrCat("written ", step));
    oracle.TrainStep(OwnLoss());
  }
  note("trained");
  for (const std::string& name : oracle.parameter_names()) {
    AddMasters("closed", name, oracle.master(name), &record);
  }
  return record;
}

// The parameters are stage and dtype.
class MastersTest
    : public ::testing::TestWithParam<std::tuple<int, std::string>> {
 protected:
  MastersTest() {
    spec_.stage = std::get<0>(GetParam());
    spec_.dtype = std::get<1>(GetParam());
    spec_.remainder_masters = spec_.dtype == "remainders";
    if (spec_.remainder_masters) spec_.dtype = "bf16";
    spec_.initial_scale_power = 8;
    spec_.poison = true;
  }
  TrainingSpec spec_;
};

TEST_P(MastersTest, WritesOfTheUserChangeWhatTheyWriteAlone) {
  int cell = spec_.stage;
  for (const auto& [name, write] : Writes()) {
    for (int world_size : {1, 2, 3}) {
      // Half of the cells, and at the next stage the other half.
      if (++cell % 2 == 0) continue;
      if (world_size == 1 && !spec_.remainder_masters) continue;
      SCOPED_TRACE(absl::StrCat(name, " on ", world_size, " ranks"));
      const Record expected = WriteAndTrainWithOracle(write, spec_, world_size);
      for (const std::string& answer :
           RunOnRanks(world_size, "WriteAndTrain",
                      absl::StrCat(name, " ", spec_.ToText()))) {
        EXPECT_EQ(FirstDifference(expected, RecordFromText(answer)), "");
      }
    }
  }
}

TEST_P(MastersTest, AlsoWhereUnitsStayWholeOrPersist) {
  spec_.overlap = false;
  for (int64_t threshold : {20, 100000}) {
    spec_.param_persistence_threshold = threshold;
    for (const char* name : {"normal", "rows", "nothing"}) {
      SCOPED_TRACE(absl::StrCat(name, " ", spec_.ToText()));
      const Record expected =
          WriteAndTrainWithOracle(Writes().at(name), spec_, 2);
      for (const std::string& answer : RunOnRanks(
               2, "WriteAndTrain", absl::StrCat(name, " ", spec_.ToText()))) {
        EXPECT_EQ(FirstDifference(expected, RecordFromText(answer)), "");
      }
    }
  }
}

// Halves between 1 and the next value of bfloat16, and of -1: where parameters
// begin with them, and where they are set.
TESSERA_RANK_FUNCTION(ParametersThatAreTies) {
  const TrainingSpec spec = TrainingSpec::FromText(args);
  torch::manual_seed(TrainingSpec::kModelSeed);
  const auto model = MakeTestModel(spec.model);
  {
    torch::NoGradGuard no_grad;
    Weight(*model).fill_(1.00390625);
  }
  TESSERA_ASSIGN_OR_RETURN(auto engine,
                           MakeEngine(model, spec, world.communicator()));
  std::string values;
  const auto note = [&]() -> absl::Status {
    for (const auto& value : {engine->Master("blocks.1.up.weight"),
                              engine->Parameter("blocks.1.up.weight")}) {
      TESSERA_RETURN_IF_ERROR(value.status());
      const at::Tensor wide = value->to(at::kFloat);
      absl::StrAppend(&values, wide[3][4].item<float>(),
                      wide.eq(wide[3][4]).all().item<bool>() ? " " : "! ");
    }
    return absl::OkStatus();
  };
  TESSERA_RETURN_IF_ERROR(note());
  TESSERA_RETURN_IF_ERROR(engine->SetMaster(
      "blocks.1.up.weight", torch::full({29, 13}, -1.00390625)));
  TESSERA_RETURN_IF_ERROR(note());
  TESSERA_RETURN_IF_ERROR(engine->Close());
  return values;
}

TEST_P(MastersTest, TiesGoAwayFromZeroBesideRemainders) {
  if (spec_.dtype != "bf16") return;
  for (const int world_size : {1, 2}) {
    EXPECT_THAT(
        RunOnRanks(world_size, "ParametersThatAreTies", spec_.ToText()),
        Each(spec_.remainder_masters ? "1.00391 1.00781 -1.00391 -1.00781 "
                                     : "1.00391 1 -1.00391 -1 "));
  }
}

INSTANTIATE_TEST_SUITE_P(All, MastersTest,
                         ::testing::Combine(::testing::Values(0, 1, 2, 3),
                                            ::testing::Values("bf16", "fp16",
                                                              "remainders")),
                         [](const auto& info) {
                           return absl::StrCat("Stage", std::get<0>(info.param),
                                               std::get<1>(info.param));
                         });

// ---- buffers

class BuffersTest : public MastersTest {};
INSTANTIATE_TEST_SUITE_P(All, BuffersTest,
                         ::testing::Combine(::testing::Values(0, 3),
                                            ::testing::Values("bf16", "fp16")),
                         [](const auto& info) {
                           return absl::StrCat("Stage", std::get<0>(info.param),
                                               std::get<1>(info.param));
                         });

TEST_P(BuffersTest, AreOfTheDtypeThatIsAskedFor) {
  spec_.model = "ConvNorm";
  spec_.buffer_dtype = spec_.dtype;
  spec_.gradients = true;
  for (int world_size : {1, 2}) ExpectEqualsOracle(spec_, world_size);
  // Norms in float32 take statistics in either.
  spec_.fp32_norms = true;
  spec_.buffer_dtype = "fp32";
  ExpectEqualsOracle(spec_, 2);
}

// "" if the buffers are what they were: while trained, of spec.buffer_dtype,
// then again of their own, with those values.
TESSERA_RANK_FUNCTION(BuffersAfterClose) {
  const TrainingSpec spec = TrainingSpec::FromText(args);
  TESSERA_ASSIGN_OR_RETURN(Trainee t,
                           Trainee::Make(spec, world.communicator()));
  TESSERA_RETURN_IF_ERROR(t.TrainStep(0));
  const at::ScalarType dtype =
      spec.buffer_dtype == "bf16" ? torch::kBFloat16 : torch::kHalf;
  std::vector<at::Tensor> trained;
  for (const auto& buffer : t.model->named_buffers()) {
    const bool counter = buffer.key() == "norm1.num_batches_tracked";
    if (buffer.value().scalar_type() != (counter ? torch::kLong : dtype)) {
      return absl::InternalError(absl::StrCat(buffer.key(), " while trained"));
    }
    trained.push_back(buffer.value().clone());
  }
  TESSERA_RETURN_IF_ERROR(t.engine->Close());
  for (size_t i = 0; i < trained.size(); ++i) {
    const at::Tensor buffer = t.model->buffers()[i];
    const bool counter = trained[i].scalar_type() == torch::kLong;
    if (buffer.scalar_type() != (counter ? torch::kLong : torch::kFloat) ||
        !at::equal(buffer, trained[i].to(buffer.scalar_type()))) {
      return absl::InternalError(absl::StrCat("buffer ", i, " after Close"));
    }
  }
  return absl::StrCat(trained.size(), " buffers");
}

TEST_P(BuffersTest, ComeBackInTheirOwnDtype) {
  spec_.model = "ConvNorm";
  spec_.buffer_dtype = spec_.dtype;
  EXPECT_THAT(RunOnRanks(2, "BuffersAfterClose", spec_.ToText()),
              Each("3 buffers"));
}

}  // namespace
}  // namespace tessera
