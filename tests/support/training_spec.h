// TrainingSpec describes a run of a test model, for the engine and the oracle.
#ifndef TESTS_SUPPORT_TRAINING_SPEC_H_
#define TESTS_SUPPORT_TRAINING_SPEC_H_

#include <algorithm>
#include <cstdint>
#include <string>

#include "absl/strings/string_view.h"
#include "config/config.pb.h"
#include "verify/oracle.h"

namespace tessera {

struct TrainingSpec {
  static constexpr uint64_t kModelSeed = 20;
  static constexpr uint64_t kRankSeed = 7000;  // that of rank 0

  // What is computed follows. Dtypes are "fp32", "bf16" or "fp16".
  std::string model = "Mlp";
  int steps = 3;
  int accumulation = 1;
  // proto::Optimizer as text without spaces.
  std::string optimizer = "type:'AdamW',params{lr:0.01,weight_decay:0.1}";
  std::string dtype = "fp32";              // of parameters; fp32: unchanged
  bool fp32_norms = false;                 // except those of norms
  std::string buffer_dtype;                // of buffers; "": unchanged
  std::string reduce_dtype;                // communication_data_type, or ""
  std::string gradient_dtype;              // grad_accum_dtype, or ""
  bool narrow_masters = false;             // master_dtype is `dtype`
  bool remainder_masters = false;          // or "fp32_remainder"
  std::string accumulation_mode = "each";  // or "local"
  std::string reduction = "mean";          // or "sum"
  double predivide = 1;                    // gradient_predivide_factor
  double clipping = 0;                     // 0: none
  double clipping_norm = 2;
  double clipping_value = 0;  // of elements; 0: none
  double adaptive = 0;        // adaptive_gradient_clipping
  // Whether ranks have unequal numbers of samples, some of them none.
  bool weights = false;
  bool check_overflow = true;  // with bf16
  double loss_scale = 0;       // with fp16; 0: dynamic, that is:
  int initial_scale_power = 16;
  int loss_scale_window = 1000;
  int hysteresis = 2;
  int min_loss_scale = 1;
  // The value of sharding.shard_group_size, which decides in which order sums
  // run, except at stage 0. 0: all ranks.
  int shard_group = 0;
  // Whether AdamW has the bits of torch::optim::AdamW: those of the CPU, on all
  // devices.
  bool libtorch_exact = false;
  bool libtorch_fused = false;
  // tensor_parallel.autotp_size, and which parameters are divided
  // (TensorCutsOf).
  int tensor = 1;
  int cuts = 0;
  int sequence = 1;  // sequence_parallel_size
  // pipeline.stages, each with the oracle's ranks; and pipeline.split_points,
  // separated by ';'. "": where elements say.
  int pipeline = 1;
  std::string split;
  std::string schedule;    // pipeline.schedule
  bool gradients = false;  // every step's gradients go into the record
  bool outcomes = false;   // and so do its scale and norm

  // How it is computed follows; the result is the same. -1: the configuration's
  // default.
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
  // The value of activation_checkpointing: "", or "units/policy/check"
  // ("auto/full").
  std::string recompute;
  // The value of activation_checkpointing.offload: "cpu" or "nvme"; "": none.
  std::string activations;
  // Offload of optimizer states to nvme: the ratio; below 0: none. And of
  // parameters: max_in_cpu. Or both to "cpu", which has an effect on a device.
  std::string tier = "nvme";
  double states_on_disk = -1;
  int64_t parameters_in_memory = -1;
  std::string parameters_tier;     // if not `tier`
  bool gradients_on_disk = false;  // with states_on_disk
  // The device for Engine::Offload, which is called after the first step;
  // Reload follows two steps later. Parameters move only if `served` is "off".
  // "": neither is called.
  std::string moved;
  bool poison = false;  // SetPoisonOnFree
  // A number N means device N without hardware (testing/device), on which the
  // engine trains while another one is current. "1/workers" has a thread for
  // each stream; "1/host" has collectives in host memory, as if the device had
  // none. "cuda:0" is that GPU, also for the oracle; "" is the CPU.
  std::string device;
  // Bytes for ConstructSharded, which builds the model; 0: it is built plainly.
  int64_t construct_budget = 0;
  // proto::Config as text without spaces, for settings that do not change the
  // result.
  std::string more;

  // Returns which rank of the oracle's a rank of a job is.
  int DataRank(int rank, int world_size) const {
    return rank % std::max(1, world_size / pipeline) / (tensor * sequence);
  }
  // Converts to "model=Gpt stage=3", the fields that differ from the defaults,
  // and back. Of two fields with one name the first one counts.
  std::string ToText() const;
  static TrainingSpec FromText(absl::string_view text);
  // Returns the device that the oracle also trains on.
  at::Device OracleDevice() const;
  // Returns the folder for what goes to a disk.
  static std::string SwapFolder();
  // Returns a text that is equal if the result is.
  std::string ResultText() const;
};

// Returns a rank's number of samples in a micro-batch, with `weights`.
double WeightOf(int rank, int64_t micro_batch);

proto::Config ConfigOf(const TrainingSpec& spec);
OracleOptions OracleOptionsOf(const TrainingSpec& spec, int world_size);

}  // namespace tessera
#endif  // TESTS_SUPPORT_TRAINING_SPEC_H_
