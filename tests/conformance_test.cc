// The conformance suite of c10d backends (tests/conformance.h), W = 1 to 5.
#include "tests/conformance.h"

#include <map>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "base/status.h"
#include "base/status_matchers.h"
#include "base/torch_guard.h"
#include "comm/nccl_communicator.h"
#include "comm/shm_backend.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/rank_pool.h"
#include "torch/csrc/distributed/c10d/FileStore.hpp"
#include "torch/csrc/distributed/c10d/ProcessGroupGloo.hpp"
#include "torch/torch.h"

namespace tessera {
namespace {

// It writes into strided tensors as if they were dense, or refuses them on some
// ranks only; and who sends nothing to a receive from any rank waits for ever.
const ConformanceLimits kGlooLimits = {.strided = false,
                                       .empty_from_any = false};

using BackendPtr = c10::intrusive_ptr<c10d::Backend>;

absl::StatusOr<BackendPtr> MakeGloo(c10::intrusive_ptr<c10d::Store> store,
                                    const World& world) {
  auto options = c10d::ProcessGroupGloo::Options::create();
  options->devices.push_back(
      c10d::ProcessGroupGloo::createDeviceForHostname("127.0.0.1"));
  options->threads = 1;
  return BackendPtr(c10::make_intrusive<c10d::ProcessGroupGloo>(
      std::move(store), world.rank(), world.world_size(), options));
}

// `args`: backend, path of a file to meet by. One for each name, kept.
absl::StatusOr<BackendPtr> BackendOf(const std::string& name,
                                     const std::string& path,
                                     const World& world) {
  static auto* const made = new std::map<std::string, BackendPtr>;
  BackendPtr& backend = (*made)[name];
  if (backend != nullptr) return backend;
  auto store = c10::make_intrusive<c10d::FileStore>(path, world.world_size());
  NcclCommunicatorOptions options;
  options.rank = options.device = world.rank();
  options.world_size = world.world_size();
  options.collective_timeout = absl::Seconds(60);
  if (name == "gloo") {
    TESSERA_ASSIGN_OR_RETURN(backend, MakeGloo(store, world));
  } else if (name == "shm") {
    TESSERA_ASSIGN_OR_RETURN(backend, MakeShmBackend(store, options));
  } else {
    TESSERA_ASSIGN_OR_RETURN(backend, MakeNcclBackend(store, options));
  }
  return backend;
}

std::string Told(const ConformanceReport& report) {
  return absl::StrCat(report.passed, "|",
                      absl::StrJoin(report.refused_cells, ";"), "|",
                      absl::StrJoin(report.wrong_cells, ";"), "|",
                      absl::StrJoin(report.failures, "\n"));
}

TESSERA_RANK_FUNCTION(Conformance) {
  const std::vector<std::string> words = absl::StrSplit(args, ' ');
  TESSERA_ASSIGN_OR_RETURN(BackendPtr backend,
                           BackendOf(words[0], words[1], world));
  ConformanceLimits limits;
  if (words[0] == "gloo") limits = kGlooLimits;
  if (words[0] == "nccl") {
    limits.strided = limits.empty_from_any = false;
    limits.device =
        c10::Device(at::kCUDA, static_cast<c10::DeviceIndex>(world.rank()));
  }
  ConformanceReport report =
      RunConformance(*backend, ConformanceValues::kExact, limits);
  if (words[0] == "shm") {
    const ConformanceReport more =
        RunConformance(*backend, ConformanceValues::kRounding);
    report.passed += more.passed;
    report.refused_cells.insert(more.refused_cells.begin(),
                                more.refused_cells.end());
    report.wrong_cells.insert(more.wrong_cells.begin(), more.wrong_cells.end());
    report.failures.insert(report.failures.end(), more.failures.begin(),
                           more.failures.end());
  }
  return Told(report);
}

// 64 MiB in all, sums.
TESSERA_RANK_FUNCTION(LargeSums) {
  const std::vector<std::string> words = absl::StrSplit(args, ' ');
  TESSERA_ASSIGN_OR_RETURN(BackendPtr backend,
                           BackendOf(words[0], words[1], world));
  ConformanceReport report;
  for (at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    ConformanceCase one;
    one.dtype = dtype;
    one.reduce = c10d::ReduceOp::SUM;
    if (words[0] == "shm") one.values = ConformanceValues::kRounding;
    const auto all = (64 << 20) / static_cast<int64_t>(c10::elementSize(dtype));
    for (const char* op :
         {"all_reduce", "reduce_scatter_base", "all_gather_base"}) {
      one.op = op;
      one.numel = one.op == "all_reduce" ? all : all / world.world_size();
      const std::string wrong = RunConformanceCase(*backend, one);
      if (wrong.empty()) {
        ++report.passed;
      } else {
        report.failures.push_back(absl::StrCat(one.Cell(), ": ", wrong));
      }
    }
  }
  return Told(report);
}

class ConformanceTest : public testing::TestWithParam<int> {
 protected:
  int size() const { return GetParam(); }

  struct Report {
    int64_t passed = 0;
    std::string refused, wrong, failures;
  };

  // By rank.
  std::vector<Report> Run(const char* function, const std::string& backend) {
    const std::string path =
        absl::StrCat(testing::TempDir(), "/meet.", backend, ".", size());
    std::vector<Report> reports;
    for (const auto& answer : RankPool::Get(size())->Run(
             function, absl::StrCat(backend, " ", path), absl::Minutes(5))) {
      TESSERA_EXPECT_OK(answer.status());
      const std::vector<std::string> parts =
          absl::StrSplit(answer.value_or("0|||"), absl::MaxSplits('|', 3));
      reports.push_back({std::stoll(parts[0]), parts[1], parts[2], parts[3]});
    }
    return reports;
  }
};

TEST_P(ConformanceTest, Shm) {
  for (const Report& report : Run("Conformance", "shm")) {
    EXPECT_EQ(report.refused, "");
    EXPECT_EQ(report.failures, "");
    EXPECT_GT(report.passed, 3000);
  }
}

// The cells that c10d's Gloo does not do: docs/communication.md lists them.
bool GlooRefuses(const ConformanceCase& cell, int size) {
  const bool reduces = cell.reduce != c10d::ReduceOp::UNUSED;
  const bool is_message =
      cell.op == "send_receive" || cell.op == "receive_any_source";
  if (cell.op == "all_to_all") return true;
  if (cell.op == "send_receive" && size == 1) return true;
  if (is_message || cell.op == "barrier") return false;
  if (cell.dtype == at::kShort) return true;
  if (at::isComplexType(cell.dtype)) {
    return !reduces && cell.op != "broadcast";
  }
  return cell.reduce == c10d::ReduceOp::AVG && !at::isFloatingType(cell.dtype);
}

std::string RefusedByGloo(int size) {
  std::set<std::string> cells;
  for (const ConformanceCase& cell :
       ConformanceCells(ConformanceValues::kExact, kGlooLimits)) {
    if (GlooRefuses(cell, size)) cells.insert(cell.Cell());
  }
  return absl::StrJoin(cells, ";");
}

TEST_P(ConformanceTest, Gloo) {
  for (const Report& report : Run("Conformance", "gloo")) {
    EXPECT_EQ(report.refused, RefusedByGloo(size()));
    for (absl::string_view cell :
         absl::StrSplit(report.wrong, ';', absl::SkipEmpty())) {
      // true + true is a byte of 2; complex averages are complex quotients.
      EXPECT_TRUE(absl::EndsWith(cell, " Bool sum") ||
                  absl::EndsWith(cell, " ComplexFloat avg"))
          << report.failures;
    }
    EXPECT_GT(report.passed, 800);
  }
}

// What NCCL refuses is its own business; what it does must be right.
TEST_P(ConformanceTest, Nccl) {
  if (static_cast<int>(VisibleGpus().size()) < size()) {
    GTEST_SKIP() << "needs " << size() << " GPUs";
  }
  for (const Report& report : Run("Conformance", "nccl")) {
    EXPECT_EQ(report.failures, "");
    EXPECT_GT(report.passed, 0);
  }
}

TEST_P(ConformanceTest, LargeSums) {
  if (size() != 2 && size() != 4) return;
  for (const char* backend : {"shm", "gloo"}) {
    for (const Report& report : Run("LargeSums", backend)) {
      EXPECT_EQ(report.passed, 6);
      EXPECT_EQ(report.failures, "");
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, ConformanceTest, testing::Range(1, 6),
                         [](const auto& info) {
                           return absl::StrCat("World", info.param);
                         });

}  // namespace
}  // namespace tessera
