#include "comm/launch/launch_variables.h"

#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/status_matchers.h"
#include "comm/launch/job.h"
#include "comm/launch/slurm_lists.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tessera {
namespace {

using ::absl::StatusCode;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

// `base` with some changed; an empty value takes the variable away.
Variables With(Variables base, const Variables& changes) {
  for (const auto& [name, value] : changes) base[name] = value;
  return base;
}

absl::StatusOr<Job> JobOf(const Variables& variables,
                          const std::string& hydra_proxy = "",
                          const JobFlags& flags = {}) {
  return FindJob(flags, {variables, hydra_proxy, false});
}

void ExpectRefused(const Variables& variables, const std::string& words) {
  EXPECT_THAT(JobOf(variables),
              StatusIs(StatusCode::kInvalidArgument, HasSubstr(words)));
}

// ---- Slurm ----

// Task 3 of 5 on node01 (2 tasks), node02 (2) and node07 (1).
const Variables kSlurm = {{"SLURM_PROCID", "3"},
                          {"SLURM_NTASKS", "5"},
                          {"SLURM_LOCALID", "1"},
                          {"SLURM_NODEID", "1"},
                          {"SLURM_STEP_TASKS_PER_NODE", "2(x2),1"},
                          {"SLURM_STEP_NODELIST", "node[01-02,07]"},
                          {"SLURM_JOB_NODELIST", "node[00-99]"},
                          {"SLURM_JOB_ID", "4711"},
                          {"SLURM_STEP_ID", "2"}};

TEST(SlurmTest, AStepOfSeveralNodes) {
  TESSERA_ASSERT_OK_AND_ASSIGN(const Job job, JobOf(kSlurm));
  EXPECT_EQ(job.launcher, "Slurm");
  EXPECT_EQ(job.rank, 3);
  EXPECT_EQ(job.world_size, 5);
  EXPECT_EQ(job.rendezvous,
            "tcp://node01:" + std::to_string(DerivedPort("slurm.4711.2.0")));
  EXPECT_FALSE(job.store_hosted);
  EXPECT_EQ(job.attempt, "slurm.4711.2.0");
  TESSERA_ASSERT_OK_AND_ASSIGN(const auto placement, FindPlacement(kSlurm, ""));
  EXPECT_EQ(placement->local_rank, 1);
  EXPECT_EQ(placement->local_world_size, 2);
}

TEST(SlurmTest, OtherNamesForTheSame) {
  TESSERA_ASSERT_OK_AND_ASSIGN(
      Job job, JobOf(With(kSlurm, {{"SLURM_STEP_NODELIST", ""}})));
  EXPECT_THAT(job.rendezvous, HasSubstr("tcp://node00:"));
  // The step's own number goes before the job's.
  TESSERA_ASSERT_OK_AND_ASSIGN(
      job, JobOf(With(kSlurm, {{"SLURM_STEP_NUM_TASKS", "4"}})));
  EXPECT_EQ(job.world_size, 4);
  TESSERA_ASSERT_OK_AND_ASSIGN(
      job, JobOf(With(kSlurm, {{"MASTER_ADDR", "h"}, {"MASTER_PORT", "77"}})));
  EXPECT_EQ(job.rendezvous, "tcp://h:77");
  TESSERA_ASSERT_OK_AND_ASSIGN(
      auto placement,
      FindPlacement(With(kSlurm, {{"SLURM_STEP_TASKS_PER_NODE", ""},
                                  {"SLURM_NTASKS_PER_NODE", "3"},
                                  {"SLURM_NODEID", ""}}),
                    ""));
  EXPECT_EQ(placement->local_world_size, 3);
}

TEST(SlurmTest, OtherStepsAndRestartsMeetElsewhere) {
  std::set<std::string> places, attempts;
  for (const Variables& change :
       std::vector<Variables>{{},
                              {{"SLURM_STEP_ID", "3"}},
                              {{"SLURM_JOB_ID", "4712"}},
                              {{"SLURM_RESTART_COUNT", "1"}}}) {
    TESSERA_ASSERT_OK_AND_ASSIGN(const Job job, JobOf(With(kSlurm, change)));
    places.insert(job.rendezvous);
    attempts.insert(job.attempt);
  }
  EXPECT_EQ(places.size(), 4);
  EXPECT_EQ(attempts.size(), 4);
}

TEST(SlurmTest, OnlyAStepOfSrunStartsRanks) {
  const Variables cases[] = {
      With(kSlurm, {{"SLURM_PROCID", ""}, {"SLURM_STEP_ID", ""}}),   // salloc
      With(kSlurm, {{"SLURM_PROCID", "0"}, {"SLURM_STEP_ID", ""}}),  // sbatch
      With(kSlurm, {{"SLURM_STEP_ID", "4294967291"}}),               // sbatch
      With(kSlurm, {{"SLURM_STEP_ID", "4294967290"}}),  // interactive step
  };
  for (const Variables& variables : cases) {
    TESSERA_ASSERT_OK_AND_ASSIGN(const Job job, JobOf(variables));
    EXPECT_EQ(job.world_size, 1);
    EXPECT_EQ(job.launcher, "nobody");
  }
}

TEST(SlurmTest, ASingleTaskIsAWorldOfOne) {
  const Variables single = With(kSlurm, {{"SLURM_PROCID", "0"},
                                         {"SLURM_NTASKS", "1"},
                                         {"SLURM_LOCALID", "0"},
                                         {"SLURM_STEP_TASKS_PER_NODE", "1"},
                                         {"SLURM_NODEID", "0"}});
  TESSERA_ASSERT_OK_AND_ASSIGN(const Job job, JobOf(single));
  EXPECT_EQ(job.world_size, 1);
  EXPECT_EQ(job.rendezvous, "");
}

TEST(SlurmTest, RefusesByName) {
  const std::pair<Variables, std::string> cases[] = {
      {{{"SLURM_PROCID", "5"}}, "SLURM_PROCID is 5, expected 0 to 4"},
      {{{"SLURM_PROCID", "x"}}, "SLURM_PROCID: expected an integer of 0"},
      {{{"SLURM_NTASKS", ""}}, "SLURM_NTASKS is missing"},
      {{{"SLURM_NTASKS", "0"}}, "SLURM_NTASKS: expected an integer of 1"},
      {{{"SLURM_STEP_ID", "x"}}, "SLURM_STEP_ID: expected an integer"},
      {{{"SLURM_LOCALID", "-1"}}, "SLURM_LOCALID: expected an integer"},
      {{{"SLURM_LOCALID", "2"}}, "SLURM_LOCALID is 2, expected 0 to 1"},
      {{{"SLURM_STEP_TASKS_PER_NODE", "2(x"}},
       "SLURM_STEP_TASKS_PER_NODE: expected tasks such as 2(x3),1, got '2(x'"},
      {{{"SLURM_STEP_NODELIST", "node[1-"}},
       "SLURM_STEP_NODELIST: expected hosts such as node[01-03,7],login, got "
       "'node[1-'"},
      {{{"SLURM_STEP_NODELIST", ""}, {"SLURM_JOB_NODELIST", ""}},
       "MASTER_ADDR is missing"},
      {{{"SLURM_JOB_ID", ""}}, "MASTER_PORT is missing"},
      {{{"MASTER_PORT", "70000"}}, "MASTER_PORT: expected an integer of 1"},
  };
  for (const auto& [change, words] : cases) {
    ExpectRefused(With(kSlurm, change), words);
  }
}

TEST(SlurmListsTest, FirstHost) {
  const std::pair<const char*, const char*> cases[] = {
      {"localhost", "localhost"},
      {"a,b", "a"},
      {"node[01-03,7]", "node01"},
      {"node[7,01-03],login", "node7"},
      {"rack[2-3]n[10,12]-ib", "rack2n10-ib"},
      {"n1.cluster.org,n2", "n1.cluster.org"},
  };
  for (const auto& [list, host] : cases) {
    EXPECT_THAT(FirstSlurmHost(list), IsOkAndHolds(host)) << list;
  }
  for (const char* list : {"", ",a", "node[", "node[]", "node[a-b]", "node[1-]",
                           "node[1", "a b", "node]", "node[1,,2]"}) {
    EXPECT_THAT(FirstSlurmHost(list), StatusIs(StatusCode::kInvalidArgument))
        << list;
  }
}

TEST(SlurmListsTest, TaskCounts) {
  EXPECT_THAT(SlurmTaskCounts("2(x3),1"),
              IsOkAndHolds(ElementsAre(2, 2, 2, 1)));
  EXPECT_THAT(SlurmTaskCounts("4"), IsOkAndHolds(ElementsAre(4)));
  for (const char* list :
       {"", "x", "2(x", "2(x0)", "2(3)", "1,", "-1", "2(x99999999)"}) {
    EXPECT_THAT(SlurmTaskCounts(list), StatusIs(StatusCode::kInvalidArgument))
        << list;
  }
}

// ---- Open MPI, MPICH ----

const Variables kOpenMpi = {{"OMPI_COMM_WORLD_RANK", "2"},
                            {"OMPI_COMM_WORLD_SIZE", "4"},
                            {"OMPI_COMM_WORLD_LOCAL_RANK", "2"},
                            {"OMPI_COMM_WORLD_LOCAL_SIZE", "4"},
                            {"PMIX_NAMESPACE", "760414209"}};

TEST(OpenMpiTest, OnOneHost) {
  TESSERA_ASSERT_OK_AND_ASSIGN(const Job job, JobOf(kOpenMpi));
  EXPECT_EQ(job.launcher, "Open MPI");
  EXPECT_EQ(job.rank, 2);
  EXPECT_EQ(job.world_size, 4);
  EXPECT_EQ(
      job.rendezvous,
      "tcp://127.0.0.1:" + std::to_string(DerivedPort("openmpi.760414209")));
  EXPECT_EQ(job.attempt, "openmpi.760414209");
  TESSERA_ASSERT_OK_AND_ASSIGN(
      const Job old,
      JobOf(With(kOpenMpi, {{"PMIX_NAMESPACE", ""},
                            {"OMPI_MCA_ess_base_jobid", "760414209"}})));
  EXPECT_EQ(old.rendezvous, job.rendezvous);
}

TEST(OpenMpiTest, OnSeveralHostsTheAddressMustBeGiven) {
  const Variables several =
      With(kOpenMpi, {{"OMPI_COMM_WORLD_LOCAL_RANK", "0"},
                      {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"}});
  ExpectRefused(several,
                "MASTER_ADDR is missing: Open MPI does not tell where rank 0 "
                "is, and 2 of 4 ranks are on this host; give rank 0's host: "
                "mpirun -x MASTER_ADDR=host");
  TESSERA_ASSERT_OK_AND_ASSIGN(const Job job,
                               JobOf(With(several, {{"MASTER_ADDR", "n1"}})));
  EXPECT_THAT(job.rendezvous, HasSubstr("tcp://n1:1"));
}

TEST(OpenMpiTest, RefusesByName) {
  const std::pair<Variables, std::string> cases[] = {
      {{{"OMPI_COMM_WORLD_SIZE", ""}}, "OMPI_COMM_WORLD_SIZE is missing"},
      {{{"OMPI_COMM_WORLD_RANK", ""}}, "OMPI_COMM_WORLD_RANK is missing"},
      {{{"OMPI_COMM_WORLD_RANK", "4"}},
       "OMPI_COMM_WORLD_RANK is 4, expected 0 to 3"},
      {{{"OMPI_COMM_WORLD_RANK", "two"}},
       "OMPI_COMM_WORLD_RANK: expected an integer of 0 to 1048576, got 'two'"},
      {{{"OMPI_COMM_WORLD_LOCAL_SIZE", "5"}},
       "OMPI_COMM_WORLD_LOCAL_SIZE is 5, expected at most 4"},
      {{{"OMPI_COMM_WORLD_LOCAL_RANK", "4"}},
       "OMPI_COMM_WORLD_LOCAL_RANK is 4, expected 0 to 3"},
      {{{"PMIX_NAMESPACE", ""}},
       "MASTER_PORT is missing: env:// needs rank 0's port there, and Open MPI "
       "gives no id"},
  };
  for (const auto& [change, words] : cases) {
    ExpectRefused(With(kOpenMpi, change), words);
  }
}

const Variables kMpich = {{"PMI_RANK", "1"},
                          {"PMI_SIZE", "2"},
                          {"MPI_LOCALRANKID", "1"},
                          {"MPI_LOCALNRANKS", "2"}};

TEST(MpichTest, OnOneHostByTheProxy) {
  TESSERA_ASSERT_OK_AND_ASSIGN(const Job job, JobOf(kMpich, "1234"));
  EXPECT_EQ(job.launcher, "MPICH");
  EXPECT_EQ(job.rank, 1);
  EXPECT_EQ(job.world_size, 2);
  EXPECT_EQ(job.rendezvous,
            "tcp://127.0.0.1:" + std::to_string(DerivedPort("mpich.1234")));
  ExpectRefused(kMpich, "MASTER_PORT is missing");
}

TEST(MpichTest, OnSeveralHostsBothMustBeGiven) {
  const Variables several =
      With(kMpich, {{"MPI_LOCALRANKID", "0"}, {"MPI_LOCALNRANKS", "1"}});
  ExpectRefused(several, "mpiexec -genv MASTER_ADDR host");
  // Each host has a proxy of its own: no port follows from it.
  EXPECT_THAT(JobOf(With(several, {{"MASTER_ADDR", "h"}}), "1234"),
              StatusIs(StatusCode::kInvalidArgument,
                       HasSubstr("MASTER_PORT is missing")));
  TESSERA_ASSERT_OK_AND_ASSIGN(
      const Job job,
      JobOf(With(several, {{"MASTER_ADDR", "h"}, {"MASTER_PORT", "5"}})));
  EXPECT_EQ(job.rendezvous, "tcp://h:5");
}

TEST(MpichTest, RefusesByName) {
  ExpectRefused(With(kMpich, {{"PMI_SIZE", ""}}), "PMI_SIZE is missing");
  ExpectRefused(With(kMpich, {{"PMI_RANK", ""}}), "PMI_RANK is missing");
  ExpectRefused(With(kMpich, {{"PMI_RANK", "2"}}), "PMI_RANK is 2");
  ExpectRefused(With(kMpich, {{"MPI_LOCALRANKID", "2"}}), "MPI_LOCALRANKID");
}

// ---- who goes before whom ----

Variables Merged(std::initializer_list<Variables> all) {
  Variables merged;
  for (const Variables& one : all) merged.insert(one.begin(), one.end());
  return merged;
}

TEST(PrecedenceTest, TheInnerLauncherCounts) {
  const Variables torchrun = {{"RANK", "1"},
                              {"WORLD_SIZE", "2"},
                              {"MASTER_ADDR", "h"},
                              {"MASTER_PORT", "1"}};
  const auto launcher_of = [](const Variables& variables) {
    const absl::StatusOr<Job> job = JobOf(variables, "1234");
    return job.ok() ? job->launcher : job.status().ToString();
  };
  EXPECT_EQ(launcher_of(Merged({torchrun, kOpenMpi, kMpich, kSlurm})),
            "torchrun");
  EXPECT_EQ(launcher_of(Merged({kOpenMpi, kMpich, kSlurm})), "Open MPI");
  EXPECT_EQ(launcher_of(Merged({kMpich, kSlurm})), "MPICH");
  EXPECT_EQ(launcher_of(kSlurm), "Slurm");
  EXPECT_EQ(launcher_of({}), "nobody");
  // As srun --mpi=pmi2 has it.
  EXPECT_EQ(
      launcher_of(Merged({kSlurm, {{"PMI_RANK", "3"}, {"PMI_SIZE", "5"}}})),
      "Slurm");
}

TEST(PrecedenceTest, FlagsGoBeforeAnyLauncher) {
  JobFlags one;
  one.world = 1;
  JobFlags file;
  file.rendezvous = "file:///shared/meet";
  for (const Variables& variables : {kOpenMpi, kMpich, kSlurm}) {
    TESSERA_ASSERT_OK_AND_ASSIGN(Job job, JobOf(variables, "", one));
    EXPECT_EQ(job.world_size, 1);
    // The launcher still says who this is.
    TESSERA_ASSERT_OK_AND_ASSIGN(job, JobOf(variables, "", file));
    EXPECT_EQ(job.rendezvous, "file:///shared/meet");
    EXPECT_GT(job.world_size, 1);
    EXPECT_GT(job.rank, 0);
  }
}

TEST(PrecedenceTest, RanksOfWorldFlagLookAtNoOtherLauncher) {
  const Variables variables = Merged({{{"RANK", "1"},
                                       {"WORLD_SIZE", "2"},
                                       {"MASTER_ADDR", "127.0.0.1"},
                                       {"MASTER_PORT", "9"}},
                                      kSlurm});
  JobFlags flags;
  flags.world = 2;
  TESSERA_ASSERT_OK_AND_ASSIGN(const Job job,
                               FindJob(flags, {variables, "", true}));
  EXPECT_EQ(job.launcher, "--world");
  EXPECT_EQ(job.rank, 1);
  EXPECT_TRUE(job.store_hosted);
  EXPECT_EQ(job.attempt, "");
}

TEST(TorchrunTest, LocalNumbersMustFit) {
  const Variables torchrun = {{"RANK", "1"},        {"WORLD_SIZE", "2"},
                              {"LOCAL_RANK", "1"},  {"LOCAL_WORLD_SIZE", "2"},
                              {"MASTER_ADDR", "h"}, {"MASTER_PORT", "1"}};
  TESSERA_EXPECT_OK(JobOf(torchrun));
  ExpectRefused(With(torchrun, {{"LOCAL_RANK", "2"}}), "LOCAL_RANK is 2");
  ExpectRefused(With(torchrun, {{"LOCAL_RANK", "7"}, {"LOCAL_WORLD_SIZE", ""}}),
                "LOCAL_RANK is 7, expected 0 to 1 (the world size is 2)");
  ExpectRefused(With(torchrun, {{"LOCAL_WORLD_SIZE", "3"}}),
                "LOCAL_WORLD_SIZE is 3");
  ExpectRefused(With(torchrun, {{"TORCHELASTIC_USE_AGENT_STORE", "perhaps"}}),
                "TORCHELASTIC_USE_AGENT_STORE: expected True or False, got "
                "'perhaps'");
}

TEST(DerivedPortTest, StaysInItsRange) {
  std::set<int> ports;
  for (int i = 0; i < 1000; ++i) {
    const int port = DerivedPort("slurm." + std::to_string(i) + ".0.0");
    EXPECT_GE(port, 10000);
    EXPECT_LT(port, 30000);
    ports.insert(port);
  }
  EXPECT_GT(ports.size(), 900);
}

}  // namespace
}  // namespace tessera
