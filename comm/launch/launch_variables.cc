#include "comm/launch/launch_variables.h"

#include <unistd.h>

#include <fstream>
#include <limits>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "comm/launch/slurm_lists.h"

namespace tessera {
namespace {

// Slurm's own steps (batch script, interactive shell, ...) count down from
// here.
constexpr int64_t kSpecialStep = 0xfffffff0;

absl::Status Misfit(const std::string& name, absl::string_view expected,
                    absl::string_view text) {
  return absl::InvalidArgumentError(absl::StrCat("environment variable ", name,
                                                 ": expected ", expected,
                                                 ", got '", text, "'"));
}

// A rank and a number of ranks that fit together, where both are there.
absl::Status CheckPair(std::optional<int> rank, const std::string& rank_name,
                       std::optional<int> size, absl::string_view words) {
  if (!rank.has_value() || !size.has_value() || *rank < *size) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      absl::StrCat(rank_name, " is ", *rank, ", expected 0 to ", *size - 1,
                   " (the ", words, " is ", *size, ")"));
}

struct LocalNames {
  const char* rank;
  const char* size;
};

// rank_name and world_size_name are set; reads what they name, and the locals.
absl::Status ReadNumbers(const Variables& variables, const LocalNames& local,
                         Placement* p) {
  TESSERA_ASSIGN_OR_RETURN(
      p->world_size, FindInt(variables, p->world_size_name, 1, kMaxWorldSize));
  TESSERA_ASSIGN_OR_RETURN(p->rank,
                           FindInt(variables, p->rank_name, 0, kMaxWorldSize));
  TESSERA_RETURN_IF_ERROR(
      CheckPair(p->rank, p->rank_name, p->world_size, "world size"));
  TESSERA_ASSIGN_OR_RETURN(p->local_rank,
                           FindInt(variables, local.rank, 0, kMaxWorldSize));
  TESSERA_RETURN_IF_ERROR(
      CheckPair(p->local_rank, local.rank, p->world_size, "world size"));
  if (local.size == nullptr) return absl::OkStatus();
  TESSERA_ASSIGN_OR_RETURN(p->local_world_size,
                           FindInt(variables, local.size, 1, kMaxWorldSize));
  if (p->local_world_size.has_value() && p->world_size.has_value() &&
      *p->local_world_size > *p->world_size) {
    return absl::InvalidArgumentError(absl::StrCat(
        local.size, " is ", *p->local_world_size, ", expected at most ",
        *p->world_size, " (the world size)"));
  }
  return CheckPair(p->local_rank, local.rank, p->local_world_size,
                   "local world size");
}

// MPI's launchers tell no address of rank 0. On a single host none is needed.
void SetHostIfAlone(absl::string_view program, Placement* p) {
  if (p->local_world_size.has_value() && p->local_world_size == p->world_size) {
    p->host = "127.0.0.1";
    return;
  }
  const std::string seen =
      p->local_world_size.has_value() && p->world_size.has_value()
          ? absl::StrCat(*p->local_world_size, " of ", *p->world_size,
                         " ranks are on this host")
          : "it does not say how many ranks are on this host";
  p->host_missing = absl::StrCat("MASTER_ADDR is missing: ", p->launcher,
                                 " does not tell where rank 0 is, and ", seen,
                                 "; give rank 0's host: ", program);
}

absl::StatusOr<Placement> OfTorchrun(const Variables& variables) {
  Placement p;
  p.launcher = "torchrun";
  p.rank_name = "RANK";
  p.world_size_name = "WORLD_SIZE";
  TESSERA_RETURN_IF_ERROR(
      ReadNumbers(variables, {"LOCAL_RANK", "LOCAL_WORLD_SIZE"}, &p));
  p.host_missing = "MASTER_ADDR is missing: env:// needs rank 0's host there";
  return p;
}

absl::StatusOr<Placement> OfOpenMpi(const Variables& variables) {
  Placement p;
  p.launcher = "Open MPI";
  p.rank_name = "OMPI_COMM_WORLD_RANK";
  p.world_size_name = "OMPI_COMM_WORLD_SIZE";
  TESSERA_RETURN_IF_ERROR(ReadNumbers(
      variables, {"OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"},
      &p));
  SetHostIfAlone("mpirun -x MASTER_ADDR=host", &p);
  for (const char* name : {"PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"}) {
    const std::optional<std::string> id = Find(variables, name);
    if (!id.has_value()) continue;
    p.job_id = absl::StrCat("openmpi.", *id);
    break;
  }
  return p;
}

absl::StatusOr<Placement> OfMpich(const Variables& variables,
                                  const std::string& hydra_proxy) {
  Placement p;
  p.launcher = "MPICH";
  p.rank_name = "PMI_RANK";
  p.world_size_name = "PMI_SIZE";
  TESSERA_RETURN_IF_ERROR(
      ReadNumbers(variables, {"MPI_LOCALRANKID", "MPI_LOCALNRANKS"}, &p));
  SetHostIfAlone("mpiexec -genv MASTER_ADDR host", &p);
  // Proxies of several hosts have different ids.
  if (!p.host.empty() && !hydra_proxy.empty()) {
    p.job_id = absl::StrCat("mpich.", hydra_proxy);
  }
  return p;
}

// True in a step that srun made for ranks.
absl::StatusOr<bool> InSlurmStep(const Variables& variables) {
  if (!Find(variables, "SLURM_PROCID").has_value()) return false;
  for (const char* name : {"SLURM_STEP_ID", "SLURM_STEPID"}) {
    const std::optional<std::string> text = Find(variables, name);
    if (!text.has_value()) continue;
    int64_t step = 0;
    if (!absl::SimpleAtoi(*text, &step) || step < 0) {
      return Misfit(name, "an integer of at least 0", *text);
    }
    return step < kSpecialStep;
  }
  return false;
}

// Returns the first of the names that is set; the last one if none is.
std::string FirstSet(const Variables& variables,
                     std::initializer_list<const char*> names) {
  std::string name;
  for (const char* candidate : names) {
    name = candidate;
    if (Find(variables, name).has_value()) break;
  }
  return name;
}

absl::Status ReadSlurmLocalSize(const Variables& variables, Placement* p) {
  const std::string name =
      FirstSet(variables, {"SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE",
                           "SLURM_NTASKS_PER_NODE"});
  const std::optional<std::string> list = Find(variables, name);
  if (!list.has_value()) return absl::OkStatus();
  auto counts = SlurmTaskCounts(*list);
  if (!counts.ok()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "environment variable ", name, ": ", counts.status().message()));
  }
  TESSERA_ASSIGN_OR_RETURN(
      const std::optional<int> node,
      FindInt(variables, "SLURM_NODEID", 0, kMaxWorldSize));
  const size_t index = static_cast<size_t>(node.value_or(0));
  // SLURM_NTASKS_PER_NODE is one number for all nodes.
  if (index < counts->size() && (node.has_value() || counts->size() == 1)) {
    p->local_world_size = (*counts)[index];
  }
  return CheckPair(p->local_rank, "SLURM_LOCALID", p->local_world_size,
                   absl::StrCat("number of tasks on this node, by ", name, " '",
                                *list, "',"));
}

absl::StatusOr<Placement> OfSlurm(const Variables& variables) {
  Placement p;
  p.launcher = "Slurm";
  p.rank_name = "SLURM_PROCID";
  p.world_size_name =
      FirstSet(variables, {"SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"});
  TESSERA_RETURN_IF_ERROR(
      ReadNumbers(variables, {"SLURM_LOCALID", nullptr}, &p));
  TESSERA_RETURN_IF_ERROR(ReadSlurmLocalSize(variables, &p));
  const std::string list_name =
      FirstSet(variables,
               {"SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"});
  if (const auto list = Find(variables, list_name)) {
    auto host = FirstSlurmHost(*list);
    if (!host.ok()) {
      return absl::InvalidArgumentError(absl::StrCat(
          "environment variable ", list_name, ": ", host.status().message()));
    }
    p.host = *host;
  } else {
    p.host_missing =
        "MASTER_ADDR is missing, and SLURM_STEP_NODELIST too: set one of them";
  }
  const auto job =
      Find(variables, FirstSet(variables, {"SLURM_JOB_ID", "SLURM_JOBID"}));
  const auto step =
      Find(variables, FirstSet(variables, {"SLURM_STEP_ID", "SLURM_STEPID"}));
  if (job.has_value()) {
    p.job_id =
        absl::StrCat("slurm.", *job, ".", step.value_or("0"), ".",
                     Find(variables, "SLURM_RESTART_COUNT").value_or("0"));
  }
  return p;
}

}  // namespace

Variables EnvironmentVariables() {
  Variables variables;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const absl::string_view text = *entry;
    const size_t equals = text.find('=');
    if (equals == absl::string_view::npos) continue;
    variables.emplace(text.substr(0, equals), text.substr(equals + 1));
  }
  return variables;
}

std::optional<std::string> Find(const Variables& variables,
                                const std::string& name) {
  const auto found = variables.find(name);
  if (found == variables.end() || found->second.empty()) return std::nullopt;
  return found->second;
}

absl::StatusOr<std::optional<int>> FindInt(const Variables& variables,
                                           const std::string& name, int min,
                                           int max) {
  const std::optional<std::string> text = Find(variables, name);
  if (!text.has_value()) return std::optional<int>();
  int value = 0;
  if (!absl::SimpleAtoi(*text, &value) || value < min || value > max) {
    return Misfit(name, absl::StrCat("an integer of ", min, " to ", max),
                  *text);
  }
  return std::optional<int>(value);
}

absl::StatusOr<std::optional<Placement>> FindPlacement(
    const Variables& variables, const std::string& hydra_proxy) {
  const auto has = [&](const char* name) {
    return Find(variables, name).has_value();
  };
  if (has("RANK") || has("WORLD_SIZE")) return OfTorchrun(variables);
  if (has("OMPI_COMM_WORLD_RANK") || has("OMPI_COMM_WORLD_SIZE")) {
    return OfOpenMpi(variables);
  }
  TESSERA_ASSIGN_OR_RETURN(const bool slurm, InSlurmStep(variables));
  const bool mpich = has("PMI_RANK") || has("PMI_SIZE");
  if (mpich && (!slurm || has("MPI_LOCALRANKID"))) {
    return OfMpich(variables, hydra_proxy);
  }
  if (slurm) return OfSlurm(variables);
  return std::optional<Placement>();
}

uint16_t DerivedPort(absl::string_view job_id) {
  constexpr uint32_t kFirst = 10000;
  constexpr uint32_t kCount = 20000;
  // FNV-1a.
  uint64_t hash = 14695981039346656037u;
  for (const char c : job_id) {
    hash = (hash ^ static_cast<unsigned char>(c)) * 1099511628211u;
  }
  return static_cast<uint16_t>(kFirst + (hash ^ (hash >> 32)) % kCount);
}

std::string FindHydraProxy() {
  std::string pid = absl::StrCat(getppid());
  // A rank may be started through shells; more than these few would be odd.
  for (int depth = 0; depth < 16 && pid != "0" && !pid.empty(); ++depth) {
    std::string name;
    std::getline(std::ifstream("/proc/" + pid + "/comm"), name);
    if (name == "hydra_pmi_proxy") return pid;
    // "pid (name) state parent ..."; the name may hold anything.
    std::string stat;
    std::getline(std::ifstream("/proc/" + pid + "/stat"), stat);
    const size_t paren = stat.rfind(')');
    if (paren == std::string::npos || paren + 4 > stat.size()) return "";
    pid = stat.substr(paren + 4, stat.find(' ', paren + 4) - (paren + 4));
  }
  return "";
}

}  // namespace tessera
