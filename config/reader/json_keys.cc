#include "config/reader/json_keys.h"

#include <algorithm>
#include <set>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/edit_distance.h"
#include "config/reader/json_options.pb.h"

namespace tessera {
namespace {

using google::protobuf::Descriptor;
using google::protobuf::FieldDescriptor;

// Adds the path of each key `key` in `schema`.
void Collect(const Descriptor& schema, absl::string_view key,
             const std::string& prefix, std::set<std::string>& found) {
  for (int i = 0; i < schema.field_count(); ++i) {
    const FieldDescriptor& field = *schema.field(i);
    const auto& options = field.options();
    if (options.HasExtension(proto::no_effect) ||
        options.HasExtension(proto::refused)) {
      continue;
    }
    if (HasJsonKey(field, key)) found.insert(absl::StrCat(prefix, key));
    if (field.message_type() == nullptr || field.is_repeated()) continue;
    Collect(*field.message_type(), key,
            absl::StrCat(prefix, JsonKeys(field)[0], "."), found);
  }
}

// Names that users of torch.optim, Hugging Face's TrainingArguments and
// Lightning's Trainer know, and the corresponding keys here.
struct Synonym {
  absl::string_view theirs, key;
};
constexpr Synonym kSynonyms[] = {
    {"learning_rate", "lr"},
    {"clip_grad_norm", "gradient_clipping"},
    {"gradient_clip_val", "gradient_clipping"},
    {"accumulate_grad_batches", "gradient_accumulation_steps"},
    {"batch_size", "train_micro_batch_size_per_gpu"},
    {"micro_batch_size", "train_micro_batch_size_per_gpu"},
    {"per_device_train_batch_size", "train_micro_batch_size_per_gpu"},
    {"global_batch_size", "train_batch_size"},
    {"zero_stage", "stage"},
    {"lr_scheduler", "scheduler"},
    {"warmup_steps", "warmup_num_steps"},
};

// Keys that real files have at the top level, where DeepSpeed ignores them.
// None of them may change what is computed: a batch size, a rate, a seed, a
// dtype or a number of layers is an error, since it would be lost.
struct Foreign {
  const char* what;
  absl::string_view keys;  // separated by commas
};
constexpr Foreign kForeignKeys[] = {
    {"a launcher's: ranks, hosts and devices are what this run was started "
     "with",
     {"cuda_visible_devices,CUDA_VISIBLE_DEVICES,local_rank,"
      "master_addr,master_port,hostfile,launcher,launcher_args,"
      "include,exclude,num_gpus,num_nodes,nnodes,node_rank,"
      "nproc_per_node,deepspeed_hostfile,deepspeed_multinode_launcher,"
      "deepspeed_inclusion_filter,deepspeed_exclusion_filter,"
      "deepspeed_port,ssh_port,force_multi,no_ssh_check"}},
    {"Accelerate's: ranks and hosts are what this run was started with",
     {"compute_environment,distributed_type,num_machines,"
      "num_processes,machine_rank,main_process_ip,main_process_port,"
      "main_training_function,rdzv_backend,same_network,downcast_bf16,"
      "tpu_env,tpu_use_cluster,tpu_use_sudo"}},
    {"Accelerate's: in a program that is ConstructSharded, and "
     "Engine::SaveSafetensors",
     {"zero3_init_flag,zero3_save_16bit_model"}},
    {"DeepSpeed ignores it, too: write \"tensorboard\", \"csv_monitor\" or "
     "\"jsonl_monitor\" at the top level",
     {"monitor_config,monitor"}},
    {"DeepSpeed ignores it, too: write \"comms_logger\" at the top level",
     {"comms_config"}},
    {"DeepSpeed ignores it, too: write \"steps_per_print\" at the top level",
     {"log,logging,log_interval,log_dir,log_file"}},
    {"a logger's: enable \"tensorboard\", \"csv_monitor\" or "
     "\"jsonl_monitor\"",
     {"wandb_project,wandb_entity,wandb_run_name,wandb_log,use_wandb,"
      "mlflow,clearml,neptune,swanlab,report_to,run_name,"
      "experiment_name,project_name"}},
    {"a trainer's: the program logs, saves and evaluates",
     {"output_dir,overwrite_output_dir,logging_dir,logging_steps,"
      "logging_strategy,logging_first_step,save_steps,save_strategy,"
      "save_interval,save_total_limit,save_safetensors,"
      "save_on_each_node,eval_steps,eval_strategy,evaluation_strategy,"
      "eval_interval,eval_batch_size,per_device_eval_batch_size,"
      "disable_tqdm,push_to_hub,hub_model_id,dataloader_num_workers,"
      "dataloader_pin_memory,num_workers,ddp_timeout,"
      "logging_batch_size_per_gpu"}},
};

}  // namespace

const char* WhoseKey(absl::string_view key) {
  for (const Foreign& foreign : kForeignKeys) {
    const std::vector<absl::string_view> keys =
        absl::StrSplit(foreign.keys, ',');
    if (std::find(keys.begin(), keys.end(), key) != keys.end()) {
      return foreign.what;
    }
  }
  return nullptr;
}

std::string KeyMeant(absl::string_view key) {
  for (const Synonym& synonym : kSynonyms) {
    if (synonym.theirs == key) return std::string(synonym.key);
  }
  return std::string(key);
}

std::vector<std::string> JsonKeys(const FieldDescriptor& field) {
  const auto& keys = field.options().GetRepeatedExtension(proto::json_key);
  if (keys.empty()) return {field.name()};
  return {keys.begin(), keys.end()};
}

bool IsCommentKey(absl::string_view key) {
  return absl::StartsWith(key, "_") || absl::StartsWith(key, "//") ||
         absl::StartsWith(key, "#") || key == "comment";
}

bool HasJsonKey(const FieldDescriptor& field, absl::string_view key) {
  const std::vector<std::string> keys = JsonKeys(field);
  return std::find(keys.begin(), keys.end(), key) != keys.end();
}

bool HasJsonKey(const Descriptor& level, absl::string_view key) {
  for (int i = 0; i < level.field_count(); ++i) {
    if (HasJsonKey(*level.field(i), key)) return true;
  }
  return false;
}

std::string FindKeyElsewhere(const Descriptor& schema, absl::string_view key) {
  std::set<std::string> found;  // two fields may have one key
  Collect(schema, key, "", found);
  return found.size() == 1 ? *found.begin() : "";
}

std::string FindNearestKey(const Descriptor& level, absl::string_view key) {
  std::vector<std::string> keys, others;
  for (int i = 0; i < level.field_count(); ++i) {
    const auto& options = level.field(i)->options();
    const bool runs = !options.HasExtension(proto::refused) &&
                      !options.HasExtension(proto::not_yet);
    for (std::string& candidate : JsonKeys(*level.field(i))) {
      (runs ? keys : others).push_back(std::move(candidate));
    }
  }
  const std::string nearest = NearestName(key, keys);
  return nearest.empty() ? NearestName(key, others) : nearest;
}

bool IsFreeForm(const FieldDescriptor& field) {
  return field.message_type() == proto::FreeForm::descriptor();
}

}  // namespace tessera
