// States on the host of a net on a device without hardware: calls between steps
// find them wherever they are, a checkpoint goes from any tier to any other.
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/memory/ledger.h"
#include "base/status.h"
#include "base/status_matchers.h"
#include "base/torch/device_ledger.h"
#include "c10/core/StreamGuard.h"
#include "c10/core/impl/VirtualGuardImpl.h"
#include "comm/world/world.h"
#include "gtest/gtest.h"
#include "testing/device/test_device.h"
#include "tests/equivalence/device_run.h"
#include "tests/support/rank_pool.h"
#include "tests/support/temp_folder.h"

namespace tessera {
namespace {

constexpr const char* kNames[] = {"a.weight", "a.bias", "b.weight", "b.bias"};

// Whatever can be asked for by name.
absl::StatusOr<std::string> AllOf(Engine* engine) {
  std::string text;
  const auto add = [&](const absl::StatusOr<at::Tensor>& tensor) {
    TESSERA_RETURN_IF_ERROR(tensor.status());
    absl::StrAppend(&text, PrintOf(tensor->cpu()), "\n");
    return absl::OkStatus();
  };
  for (const char* name : kNames) {
    TESSERA_RETURN_IF_ERROR(add(engine->Parameter(name)));
    TESSERA_RETURN_IF_ERROR(add(engine->Master(name)));
    for (const char* const which : {"exp_avg", "exp_avg_sq"}) {
      TESSERA_RETURN_IF_ERROR(add(engine->OptimizerStateOf(name, which)));
    }
  }
  TESSERA_ASSIGN_OR_RETURN(const StateDict dict, engine->FullStateDict());
  for (const auto& [name, tensor] : dict) {
    absl::StrAppend(&text, name, " ", PrintOf(tensor), "\n");
  }
  return text;
}

// Changes one of each kind.
absl::Status ChangeSome(DeviceRun* run) {
  Engine* const engine = run->engine.get();
  TESSERA_ASSIGN_OR_RETURN(const at::Tensor master, engine->Master("a.weight"));
  TESSERA_RETURN_IF_ERROR(
      engine->SetMaster("a.weight", master.cpu() * 1.25 + 0.001));
  TESSERA_RETURN_IF_ERROR(
      engine->SetOptimizerState("b.bias", "exp_avg", torch::full({5}, 0.125)));
  {  // and as a program would
    const torch::NoGradGuard no_grad;
    run->net->b->weight.mul_(1.5);
  }
  TESSERA_ASSIGN_OR_RETURN(auto scope, engine->SummonByName({"a.bias"}));
  {
    const torch::NoGradGuard no_grad;
    run->net->a->bias.add_(0.25);
  }
  return scope.Close();
}

// `args` is "way|how". Makes steps with calls and writes in between. With
// "moved", Offload comes before these and Reload after the next step.
TESSERA_RANK_FUNCTION(Calls) {
  const std::vector<std::string> words = absl::StrSplit(args, '|');
  TESSERA_ASSIGN_OR_RETURN(DeviceRun run,
                           DeviceRun::Make(WayOf(words[0]), world));
  const bool moved = words[1] == "moved";
  TESSERA_RETURN_IF_ERROR(run.TrainStep());
  if (moved) TESSERA_RETURN_IF_ERROR(run.engine->Offload());
  TESSERA_ASSIGN_OR_RETURN(std::string text, AllOf(run.engine.get()));
  TESSERA_RETURN_IF_ERROR(ChangeSome(&run));
  TESSERA_RETURN_IF_ERROR(run.TrainStep());
  if (moved) TESSERA_RETURN_IF_ERROR(run.engine->Reload());
  TESSERA_RETURN_IF_ERROR(run.TrainStep());
  TESSERA_ASSIGN_OR_RETURN(const std::string then, AllOf(run.engine.get()));
  absl::StrAppend(&text, then);
  if (moved) TESSERA_RETURN_IF_ERROR(run.engine->Offload());
  TESSERA_ASSIGN_OR_RETURN(const std::string end, run.Finish());
  return text + end;
}

// `args` is "way|way|folder|how". The first engine saves after a step, and the
// other one loads; where the save is "async" the first one goes on meanwhile.
TESSERA_RANK_FUNCTION(SaveAndLoad) {
  const std::vector<std::string> words = absl::StrSplit(args, '|');
  std::string text;
  {
    TESSERA_ASSIGN_OR_RETURN(DeviceRun run,
                             DeviceRun::Make(WayOf(words[0]), world));
    TESSERA_RETURN_IF_ERROR(run.TrainStep());
    if (words[3] == "moved") TESSERA_RETURN_IF_ERROR(run.engine->Offload());
    SaveOptions options;
    options.async = words[3] == "async";
    TESSERA_RETURN_IF_ERROR(run.engine->SaveCheckpoint(words[2], "", options));
    TESSERA_RETURN_IF_ERROR(run.TrainStep());
    TESSERA_RETURN_IF_ERROR(run.engine->WaitForCheckpoint());
    TESSERA_ASSIGN_OR_RETURN(text, AllOf(run.engine.get()));
    TESSERA_RETURN_IF_ERROR(run.Finish().status());
  }
  TESSERA_ASSIGN_OR_RETURN(DeviceRun run,
                           DeviceRun::Make(WayOf(words[1]), world));
  if (words[3] == "moved") TESSERA_RETURN_IF_ERROR(run.engine->Offload());
  TESSERA_RETURN_IF_ERROR(run.engine->LoadCheckpoint(words[2]).status());
  TESSERA_RETURN_IF_ERROR(run.TrainStep());
  TESSERA_ASSIGN_OR_RETURN(const std::string loaded, AllOf(run.engine.get()));
  TESSERA_RETURN_IF_ERROR(run.Finish().status());
  return loaded == text ? text : absl::StrCat("saved\n", text, "\n", loaded);
}

// `args` is a way. States move on another stream than what comes after, and no
// event of the program's orders the two.
TESSERA_RANK_FUNCTION(MovesOnAStream) {
  TESSERA_ASSIGN_OR_RETURN(DeviceRun run, DeviceRun::Make(WayOf(args), world));
  TESSERA_RETURN_IF_ERROR(run.TrainStep());
  const at::Device device = testdevice::TestDevice(1);
  const c10::Stream side = c10::impl::VirtualGuardImpl(device.type())
                               .getStreamFromGlobalPool(device);
  {
    const c10::StreamGuard guard(side);
    TESSERA_RETURN_IF_ERROR(run.engine->Offload());
  }
  TESSERA_RETURN_IF_ERROR(run.TrainStep());
  {
    const c10::StreamGuard guard(side);
    TESSERA_RETURN_IF_ERROR(run.engine->Reload());
  }
  TESSERA_RETURN_IF_ERROR(run.TrainStep());
  return run.Finish();
}

// `args` is a way. Returns the loss of a forward between Backward and Step,
// when gradients have already left for the host.
TESSERA_RANK_FUNCTION(LooksBeforeTheStep) {
  TESSERA_ASSIGN_OR_RETURN(DeviceRun run, DeviceRun::Make(WayOf(args), world));
  std::string text;
  for (int step = 0; step < 3; ++step) {
    TESSERA_RETURN_IF_ERROR(run.Backward());
    at::Tensor loss;
    {
      const torch::NoGradGuard no_grad;
      for (int i = 0; i < 8; ++i) loss = run.net->forward(run.x);
    }
    TESSERA_RETURN_IF_ERROR(run.engine->Step());
    absl::StrAppend(&text, PrintOf(loss.cpu()), "\n");
  }
  TESSERA_RETURN_IF_ERROR(run.Finish().status());
  return text;
}

// `args` is "way|" or "way|refused". Makes a step of moved states; with
// "refused" a step that gets no device memory comes before it and changes
// nothing.
TESSERA_RANK_FUNCTION(StepsAfterARefusal) {
  const std::vector<std::string> words = absl::StrSplit(args, '|');
  TESSERA_ASSIGN_OR_RETURN(DeviceRun run,
                           DeviceRun::Make(WayOf(words[0]), world));
  TESSERA_RETURN_IF_ERROR(run.TrainStep());
  TESSERA_RETURN_IF_ERROR(run.engine->Offload());
  TESSERA_RETURN_IF_ERROR(run.Backward());
  if (words[1] == "refused") {
    MemoryLedger& ledger = LedgerOf(testdevice::TestDevice(1));
    ledger.SetLimit(ledger.total().current_bytes);
    const absl::Status refused = run.engine->Step();
    ledger.SetLimit(MemoryLedger::kNoLimit);
    if (!absl::IsResourceExhausted(refused)) return refused.ToString();
  }
  TESSERA_RETURN_IF_ERROR(run.engine->Step());
  TESSERA_RETURN_IF_ERROR(run.TrainStep());
  return run.Finish();
}

Way WayOf(int stage, int fp16, int offload, const char* device = "1/workers") {
  return {device, stage, 0.5, 2, fp16, 0, offload};
}

using Answers = std::vector<absl::StatusOr<std::string>>;

void ExpectSame(const Answers& expected, const Answers& got) {
  ASSERT_EQ(expected.size(), got.size());
  for (size_t r = 0; r < got.size(); ++r) {
    TESSERA_ASSERT_OK(expected[r]);
    TESSERA_ASSERT_OK(got[r]);
    EXPECT_EQ(*expected[r], *got[r]) << "rank " << r;
  }
}

TEST(DeviceOffload, CallsFindWhatIsElsewhere) {
  for (const int world_size : {1, 2}) {
    for (const int stage : {1, 2, 3}) {
      for (const int fp16 : {kFp32, kBf16}) {
        RankPool* const pool = RankPool::Get(world_size);
        const Answers expected =
            pool->Run("Calls", TextOf(WayOf(stage, fp16, 0)) + "|");
        for (const int offload : {0, 1, 2, 3}) {
          if (stage < 3 && offload == 3) continue;
          for (const char* moved : {"", "moved"}) {
            // A part of them, in which every pair occurs.
            const int sum = stage + (fp16 == kBf16);
            if ((world_size + sum + offload + (*moved != 0)) % 2 == 0) continue;
            if (offload < 3 && (sum + offload / 2) % 2 == 0) continue;
            const Way way = WayOf(stage, fp16, offload);
            SCOPED_TRACE(absl::StrCat("W ", world_size, TextOf(way), moved));
            ExpectSame(expected, pool->Run("Calls", TextOf(way) + "|" + moved));
            if (HasFailure()) return;
          }
        }
      }
    }
  }
}

// The bits are also the CPU's.
TEST(DeviceOffload, StatesOf8BitsGoWhereOthersDo) {
  RankPool* const pool = RankPool::Get(2);
  for (const int stage : {1, 3}) {
    const auto calls = [&](int offload, const char* device, const char* moved) {
      Way way = WayOf(stage, kBf16, offload, device);
      way.states = "8bit";
      return pool->Run("Calls", TextOf(way) + "|" + moved);
    };
    const Answers expected = calls(0, "1/workers", "");
    for (const int offload : {0, 1, stage == 3 ? 3 : 2}) {
      for (const char* moved : {"", "moved"}) {
        SCOPED_TRACE(absl::StrCat(stage, " ", offload, moved));
        ExpectSame(expected, calls(offload, "1/workers", moved));
      }
    }
    ExpectSame(expected, calls(0, "", ""));
  }
}

// Two parameters of one storage and one of its blocks, of groups of their own.
struct OddPlaces : torch::nn::Module {
  explicit OddPlaces(at::Device device) {
    const at::Tensor all = torch::linspace(-1, 1, 1000).to(device);
    a = register_parameter("a", all.narrow(0, 0, 65));
    b = register_parameter("b", all.narrow(0, 65, 700));
  }
  at::Tensor a, b;
};

// args: a Way, of which the device counts.
TESSERA_RANK_FUNCTION(TrainOddPlaces) {
  const Way way = tessera::WayOf(args);
  testdevice::Register({});
  proto::Config config = ConfigOf(way);
  proto::ParamGroup* const group =
      config.mutable_optimizer()->add_param_groups();
  group->add_parameters("b");
  group->mutable_params()->set_lr(0.25);
  EngineOptions options;
  TESSERA_ASSIGN_OR_RETURN(options.communicator, GroupOf(way, world));
  if (!way.device.empty()) {
    RegisterTestDeviceKernels();
    options.device = testdevice::TestDevice(1);
  }
  const auto net =
      std::make_shared<OddPlaces>(options.device.value_or(at::kCPU));
  TESSERA_ASSIGN_OR_RETURN(const auto engine,
                           Engine::Create(net, config, options));
  for (int i = 0; i < 3; ++i) {
    TESSERA_RETURN_IF_ERROR(
        engine->Backward(net->a.square().sum() + 3 * net->b.square().sum()));
    TESSERA_RETURN_IF_ERROR(engine->Step());
  }
  std::string record;
  for (const char* name : {"a", "b"}) {
    TESSERA_ASSIGN_OR_RETURN(const at::Tensor master, engine->Master(name));
    TESSERA_ASSIGN_OR_RETURN(const at::Tensor state,
                             engine->OptimizerStateOf(name, "exp_avg"));
    absl::StrAppend(&record, PrintOf(master.cpu()), PrintOf(state.cpu()));
  }
  TESSERA_RETURN_IF_ERROR(engine->Close());
  return record;
}

TEST(DeviceOffload, ParametersMayShareABlockOfStates) {
  for (const int world_size : {1, 2}) {
    Way way;
    way.stage = 1;
    way.states = "8bit";
    RankPool* const pool = RankPool::Get(world_size);
    const Answers on_device = pool->Run("TrainOddPlaces", TextOf(way));
    way.device = "";
    ExpectSame(pool->Run("TrainOddPlaces", TextOf(way)), on_device);
  }
}

TEST(DeviceOffload, StatesOf8BitsAreSavedAsTheyWereAtTheCall) {
  for (const int from : {0, 2, 3}) {
    for (const int to : {0, 3}) {
      const TempFolder folder;
      Way saves = WayOf(3, kBf16, from), loads = WayOf(3, kBf16, to);
      saves.states = loads.states = "8bit";
      const std::string text =
          absl::StrCat(TextOf(saves), "|", TextOf(loads), "|",
                       folder / "checkpoint", "|async");
      for (const auto& answer : RankPool::Get(2)->Run("SaveAndLoad", text)) {
        TESSERA_ASSERT_OK(answer);
        EXPECT_FALSE(absl::StartsWith(*answer, "saved")) << text << *answer;
      }
    }
  }
}

TEST(DeviceOffload, AForwardBeforeTheStepSeesTheOldValues) {
  for (const int stage : {2, 3}) {
    const auto losses = [&](int offload) {
      Way way = WayOf(stage, kFp32, offload);
      way.clipping = 0;  // the norm comes after all that was before the step
      return RankPool::Get(2)->Run("LooksBeforeTheStep", TextOf(way));
    };
    const Answers expected = losses(0);
    for (const int offload : {1, 2, 3}) ExpectSame(expected, losses(offload));
  }
}

TEST(DeviceOffload, ARefusedStepIsMadeLater) {
  for (const int stage : {1, 3}) {
    const std::string way = TextOf(WayOf(stage, kBf16, 0));
    ExpectSame(RankPool::Get(1)->Run("StepsAfterARefusal", way + "|"),
               RankPool::Get(1)->Run("StepsAfterARefusal", way + "|refused"));
  }
}

TEST(DeviceOffload, StatesMayMoveOnAnyStream) {
  for (const int stage : {1, 3}) {
    for (const int fp16 : {kFp32, kBf16}) {
      const std::string way = TextOf(WayOf(stage, fp16, 0));
      const Answers got = RankPool::Get(2)->Run("MovesOnAStream", way);
      for (const auto& answer : got) TESSERA_EXPECT_OK(answer);
    }
  }
}

TEST(DeviceOffload, ACheckpointGoesFromAnyTierToAnother) {
  int i = 0, turn = 0;
  RankPool* const pool = RankPool::Get(2);
  for (const int fp16 : {kFp32, kBf16}) {
    Answers first;
    for (const int from : {0, 2, 3}) {
      for (const int to : {0, 2, 3}) {
        for (const char* how : {"", "async", "moved"}) {
          if (++i % 2 == 0) continue;  // in the other dtype
          if (*how != 'a' && turn++ % 4 % 3 != 0) continue;  // "" or "moved"
          const TempFolder folder;
          const std::string text = absl::StrCat(
              TextOf(WayOf(3, fp16, from)), "|", TextOf(WayOf(3, fp16, to)),
              "|", folder / "checkpoint", "|", how);
          SCOPED_TRACE(text);
          Answers got = pool->Run("SaveAndLoad", text);
          if (first.empty()) first = got;
          for (const auto& answer : got) {
            TESSERA_ASSERT_OK(answer);
            EXPECT_FALSE(absl::StartsWith(*answer, "saved")) << *answer;
          }
          ExpectSame(first, got);
          if (HasFailure()) return;
        }
      }
    }
  }
}

}  // namespace
}  // namespace tessera
