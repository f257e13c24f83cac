// TrainingSpec: what a run of a test model is, for the engine and the oracle.
#ifndef TESTS_SUPPORT_TRAINING_SPEC_H_
#define TESTS_SUPPORT_TRAINING_SPEC_H_

#include <cstdint>
#include <string>

#include "absl/strings/string_view.h"
#include "config/config.pb.h"
#include "verify/oracle.h"

namespace tessera {

struct TrainingSpec {
  static constexpr uint64_t kModelSeed = 20;
  static constexpr uint64_t kRankSeed = 7000;  // of rank 0

  // What is computed. Dtypes are "fp32", "bf16" or "fp16".
  std::string model = "Mlp";
  int steps = 3;
  int accumulation = 1;
  // proto::Optimizer as text without spaces.
  std::string optimizer = "type:'AdamW',params{lr:0.01,weight_decay:0.1}";
  std::string dtype = "fp32";              // of parameters; fp32: as they are
  bool fp32_norms = false;                 // except those of norms
  std::string buffer_dtype;                // of buffers; "": as they are
  std::string reduce_dtype;                // communication_data_type, or ""
  std::string gradient_dtype;              // grad_accum_dtype, or ""
  bool narrow_masters = false;             // master_dtype is `dtype`
  std::string accumulation_mode = "each";  // or "local"
  std::string reduction = "mean";          // or "sum"
  double predivide = 1;                    // gradient_predivide_factor
  double clipping = 0;                     // 0: none
  double clipping_norm = 2;
  double clipping_value = 0;  // of elements; 0: none
  double adaptive = 0;        // adaptive_gradient_clipping
  // Ranks have unequal numbers of samples, some none.
  bool weights = false;
  bool check_overflow = true;  // with bf16
  double loss_scale = 0;       // with fp16; 0: dynamic, that is:
  int initial_scale_power = 16;
  int loss_scale_window = 1000;
  int hysteresis = 2;
  int min_loss_scale = 1;
  // Of sharding.shard_group_size: decides in which order sums run, but at stage
  // 0. 0: all ranks.
  int shard_group = 0;
  // torch::optim::AdamW's bits: those of the CPU on all devices.
  bool libtorch_exact = false;
  bool libtorch_fused = false;
  bool gradients = false;  // every step's gradients go into the record
  bool outcomes = false;   // and so do its scale and norm

  // How; the result is the same. -1: the configuration's default.
  int stage = 0;
  bool overlap = true;  // overlap_comm
  std::string reshard;  // reshard_after_forward: "true", "false", a number
  int hpz = 1;          // zero_hpz_partition_size
  std::string shared;   // shared_working_copy; "": the default
  std::string served;   // served_gathers; "": the default
  int64_t prefetch_bucket_size = -1;
  int64_t param_persistence_threshold = 0;
  int64_t max_live_parameters = -1;
  int64_t max_reuse_distance = -1;
  int64_t reduce_bucket_size = -1;
  // activation_checkpointing: "", or "units/policy/check" ("auto/full").
  std::string recompute;
  // activation_checkpointing.offload: "cpu" or "nvme"; "": none.
  std::string activations;
  // Of offload_optimizer to nvme: the ratio; below 0: none. And of
  // offload_param: max_in_cpu. Or both to "cpu", which means something on a
  // device.
  std::string tier = "nvme";
  double states_on_disk = -1;
  int64_t parameters_in_memory = -1;
  std::string parameters_tier;     // if not `tier`
  bool gradients_on_disk = false;  // with states_on_disk
  // A device of Engine::Offload, which is called after the first step; two
  // steps later Reload. Not of parameters unless `served` is "off". "":
  // neither.
  std::string moved;
  bool poison = false;  // SetPoisonOnFree
  // A number: of a device without hardware (testing/device), on which the
  // engine trains while another is the current one; "1/workers": with a thread
  // for each stream; "1/host": with collectives in the memory of the host, as
  // if it had none. "cuda:0": there, and so does the oracle. "": the CPU.
  std::string device;
  // Built by ConstructSharded with so many bytes; 0: plainly.
  int64_t construct_budget = 0;
  // proto::Config as text without spaces, for what changes no result.
  std::string more;

  // "model=Gpt stage=3", what is not as above, and back. Of two fields of a
  // name the first one counts.
  std::string ToText() const;
  static TrainingSpec FromText(absl::string_view text);
  // The device that the oracle trains on, too.
  at::Device OracleDevice() const;
  // Of what goes to a disk.
  static std::string SwapFolder();
  // Text that is equal if the result is.
  std::string ResultText() const;
};

// A rank's number of samples in a micro-batch, with `weights`.
double WeightOf(int rank, int64_t micro_batch);

proto::Config ConfigOf(const TrainingSpec& spec);
OracleOptions OracleOptionsOf(const TrainingSpec& spec, int world_size);

}  // namespace tessera
#endif  // TESTS_SUPPORT_TRAINING_SPEC_H_
