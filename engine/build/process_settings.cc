#include "engine/build/process_settings.h"

#include <string>

#include "absl/strings/str_cat.h"
#include "base/log.h"
#include "base/torch/device_ledger.h"
#include "torch/nn/module.h"

namespace tessera {
namespace {

void WarnOfOthersLimit(const MemoryLedger& ledger, int64_t own) {
  const int64_t others = ledger.least_memory_limit();
  if (others == MemoryLedger::kNoLimit) return;
  TESSERA_LOG_RANK0(WARNING)
      << "sharding.memory_limit_bytes: another engine of this process limits "
      << ledger.device() << " to " << others << " bytes, and this one "
      << (own == 0 ? std::string("has no limit")
                   : absl::StrCat("to ", own, " bytes"))
      << ": while both are open "
      << (own == 0 || others <= own ? "the other's" : "this one's")
      << " binds what all engines hold there together";
}

}  // namespace

void ProcessSettings::LimitMemory(at::Device device, int64_t bytes, int stage) {
  MemoryLedger& ledger = LedgerOf(device);
  WarnOfOthersLimit(ledger, bytes);
  if (bytes == 0) return;
  limit_.emplace(
      &ledger, bytes,
      absl::StrCat("sharding.memory_limit_bytes: raise it, or hold less: a "
                   "higher zero_optimization.stage, more ranks, a 16-bit dtype",
                   stage < 3 ? ""
                             : ", lower stage3_max_live_parameters and "
                               "stage3_max_reuse_distance"));
}

absl::Status ProcessSettings::MakeDeterministic(
    const torch::nn::Module& module, std::optional<Determinism> determinism) {
  if (!determinism.has_value()) return absl::OkStatus();
  bool on_device = false, on_cuda = false;
  for (const at::Tensor& p : module.parameters()) {
    on_device |= p.defined() && !p.device().is_cpu();
    on_cuda |= p.defined() && p.device().is_cuda();
  }
  if (!on_device) return absl::OkStatus();
  if (on_cuda) {
    const absl::Status cublas = SetDeterministicCublas();
    if (!cublas.ok()) {
      if (*determinism == Determinism::kErrors) {
        return absl::Status(cublas.code(),
                            absl::StrCat("sharding.deterministic is \"on\", ",
                                         "and ", cublas.message()));
      }
      TESSERA_LOG_RANK0(WARNING)
          << "sharding.deterministic: " << cublas.message();
    }
  }
  deterministic_.emplace(*determinism);
  return absl::OkStatus();
}

}  // namespace tessera
