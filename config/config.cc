#include "config/config.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "base/file.h"
#include "base/status.h"
#include "config/json_reader.h"
#include "config/proto_reader.h"

namespace tessera {
namespace {

constexpr int64_t kMaxFileBytes = 16 << 20;

// True if one path is the other or lies inside it.
bool Overlap(absl::string_view a, absl::string_view b) {
  if (a.size() > b.size()) std::swap(a, b);
  if (!absl::StartsWith(b, a)) return false;
  return a.empty() || a.size() == b.size() || b[a.size()] == '.' ||
         b[a.size()] == '[';
}

// Completes a Config in place and collects what is wrong with it.
class Resolver {
 public:
  Resolver(proto::Config* config, int world_size, const ReadRecord& record)
      : config_(*config), world_size_(world_size), record_(record) {}

  std::vector<ConfigFault> Resolve() {
    if (world_size_ < 1) {
      Fault("world_size", "expected at least 1, got ", world_size_);
      return std::move(faults_);
    }
    ResolveBatch();
    ResolveClipping();
    if (config_.has_optimizer()) ResolveOptimizer();
    ResolveZero();
    CheckCommunication();
    return std::move(faults_);
  }

  std::vector<ConfigFault> ResolveCommunicationOnly() {
    CheckCommunication();
    return std::move(faults_);
  }

 private:
  template <typename... Args>
  void Fault(const std::string& path, const Args&... what) {
    if (IsDoubtful(path)) return;
    ConfigFault fault{path, absl::StrCat(what...), std::nullopt};
    const auto found = record_.positions.find(path);
    if (found != record_.positions.end()) fault.position = found->second;
    faults_.push_back(std::move(fault));
  }

  bool IsDoubtful(absl::string_view path) const {
    for (const std::string& doubtful : record_.doubtful_paths) {
      if (Overlap(path, doubtful)) return true;
    }
    return false;
  }

  static constexpr char kTrain[] = "train_batch_size";
  static constexpr char kMicro[] = "train_micro_batch_size_per_gpu";
  static constexpr char kSteps[] = "gradient_accumulation_steps";

  void ResolveBatch() {
    if (IsDoubtful(kTrain) || IsDoubtful(kMicro) || IsDoubtful(kSteps)) return;
    const size_t before = faults_.size();
    CheckPositive(kTrain, config_.has_train_batch_size(),
                  config_.train_batch_size());
    CheckPositive(kMicro, config_.has_train_micro_batch_size_per_gpu(),
                  config_.train_micro_batch_size_per_gpu());
    CheckPositive(kSteps, config_.has_gradient_accumulation_steps(),
                  config_.gradient_accumulation_steps());
    if (faults_.size() != before) return;
    const bool has_train = config_.has_train_batch_size();
    const bool has_micro = config_.has_train_micro_batch_size_per_gpu();
    if (!has_train && !has_micro) {
      Fault(kTrain, "missing: give it or ", kMicro);
    } else if (!has_train) {
      ResolveTrain();
    } else {
      ResolveFromTrain();
    }
  }

  void CheckPositive(const char* path, bool present, int64_t value) {
    if (present && value < 1) Fault(path, "expected at least 1, got ", value);
  }

  // T = M * G * W. Accumulation is 1 unless given.
  void ResolveTrain() {
    const int64_t micro = config_.train_micro_batch_size_per_gpu();
    const int64_t steps = config_.has_gradient_accumulation_steps()
                              ? config_.gradient_accumulation_steps()
                              : 1;
    int64_t train = 0;
    if (__builtin_mul_overflow(micro, steps, &train) ||
        __builtin_mul_overflow(train, int64_t{world_size_}, &train)) {
      Fault(kMicro, micro, " * ", kSteps, " ", steps, " * world size ",
            world_size_, " is too large");
      return;
    }
    config_.set_gradient_accumulation_steps(steps);
    config_.set_train_batch_size(train);
  }

  // M or G, whichever is absent, or neither.
  void ResolveFromTrain() {
    const bool has_micro = config_.has_train_micro_batch_size_per_gpu();
    if (!has_micro && !config_.has_gradient_accumulation_steps()) {
      config_.set_gradient_accumulation_steps(1);
    }
    const bool has_steps = config_.has_gradient_accumulation_steps();
    const int64_t train = config_.train_batch_size();
    const int64_t micro = config_.train_micro_batch_size_per_gpu();
    const int64_t steps = config_.gradient_accumulation_steps();
    // Divided step by step, since the product might overflow.
    int64_t rest = train;
    bool divides = Divide(rest, world_size_);
    if (has_micro) divides = divides && Divide(rest, micro);
    if (has_steps) divides = divides && Divide(rest, steps);
    if (has_micro && has_steps) divides = divides && rest == 1;
    if (!divides) {
      const auto shown = [](const char* name, bool present, int64_t value) {
        return present ? absl::StrCat(name, " ", value)
                       : absl::StrCat(name, " (absent)");
      };
      Fault(kTrain, "expected ", shown(kMicro, has_micro, micro), " * ",
            shown(kSteps, has_steps, steps), " * world size ", world_size_,
            ", got ", train);
      return;
    }
    if (!has_micro) config_.set_train_micro_batch_size_per_gpu(rest);
    if (!has_steps) config_.set_gradient_accumulation_steps(rest);
  }

  static bool Divide(int64_t& value, int64_t divisor) {
    const bool exact = value % divisor == 0;
    value /= divisor;
    return exact;
  }

  void ResolveClipping() {
    constexpr char kPath[] = "gradient_clipping";
    constexpr char kWrite[] =
        ", and this version cannot clip: write \"gradient_clipping\": 0";
    if (!config_.has_gradient_clipping()) {
      Fault(kPath, "missing; DeepSpeed's default is 1.0", kWrite);
    } else if (config_.gradient_clipping() != 0) {
      Fault(kPath, "expected 0, got ", config_.gradient_clipping(), kWrite);
    }
  }

  void ResolveOptimizer() {
    proto::Optimizer& optimizer = *config_.mutable_optimizer();
    const std::string type = optimizer.type();
    if (absl::EqualsIgnoreCase(type, "adam")) {
      optimizer.set_type("Adam");
    } else if (absl::EqualsIgnoreCase(type, "adamw")) {
      optimizer.set_type("AdamW");
    } else if (optimizer.has_type()) {
      Fault("optimizer.type", "expected Adam or AdamW, got '", type, "'");
    } else {
      Fault("optimizer.type", "missing: expected Adam or AdamW");
    }
    ResolveAdam(*optimizer.mutable_params());
  }

  void ResolveAdam(proto::AdamParams& params) {
    params.set_lr(params.lr());  // writes the default where it was absent
    params.set_eps(params.eps());
    params.set_weight_decay(params.weight_decay());
    params.set_adam_w_mode(params.adam_w_mode());
    // An empty list in a file is no request for the defaults.
    const bool absent = record_.positions.count("optimizer.params.betas") == 0;
    if (params.betas_size() == 0 && absent) {
      params.add_betas(0.9);
      params.add_betas(0.999);
    }
    CheckAtLeast0("optimizer.params.lr", params.lr());
    CheckAtLeast0("optimizer.params.weight_decay", params.weight_decay());
    if (!(params.eps() > 0) || !std::isfinite(params.eps())) {
      Fault("optimizer.params.eps", "expected a finite number above 0, got ",
            params.eps());
    }
    CheckBetas(params);
    if (!params.adam_w_mode() && params.weight_decay() != 0) {
      Fault("optimizer.params.adam_w_mode",
            "false adds weight decay to the gradient (L2), which is not "
            "available in this version: write true, or \"weight_decay\": 0");
    }
  }

  void CheckAtLeast0(const char* path, double value) {
    if (value >= 0 && std::isfinite(value)) return;
    Fault(path, "expected a finite number of at least 0, got ", value);
  }

  void CheckBetas(const proto::AdamParams& params) {
    constexpr char kPath[] = "optimizer.params.betas";
    if (params.betas_size() != 2) {
      Fault(kPath, "expected two numbers, got ", params.betas_size());
      return;
    }
    for (int i = 0; i < 2; ++i) {
      const double beta = params.betas(i);
      if (beta >= 0 && beta < 1) continue;
      Fault(absl::StrCat(kPath, "[", i, "]"),
            "expected at least 0 and less than 1, got ", beta);
    }
  }

  void ResolveZero() {
    proto::ZeroOptimization& zero = *config_.mutable_zero_optimization();
    zero.set_stage(zero.stage());
    if (zero.stage() < 0 || zero.stage() > 3) {
      Fault("zero_optimization.stage", "expected 0, 1, 2 or 3, got ",
            zero.stage());
    }
  }

  void CheckCommunication() {
    if (!config_.has_communication()) return;
    const proto::Communication& section = config_.communication();
    const std::string& backend = section.backend();
    if (backend != "auto" && backend != "shm" && backend != "hierarchical" &&
        backend != "gloo" && backend != "nccl") {
      Fault("communication.backend",
            "expected auto, shm, hierarchical, gloo or nccl, got '",
            absl::Utf8SafeCEscape(backend), "'");
    }
    CheckSeconds("communication.timeout_seconds", section.timeout_seconds());
    CheckSeconds("communication.startup_timeout_seconds",
                 section.startup_timeout_seconds());
    // In the order of their names; a map has none.
    const std::map<std::string, std::string> settings(section.nccl().begin(),
                                                      section.nccl().end());
    for (const auto& setting : settings)
      CheckNccl(setting.first, setting.second);
  }

  void CheckSeconds(const char* path, double value) {
    if (value > 0 && std::isfinite(value)) return;
    Fault(path, "expected a finite number of seconds above 0, got ", value);
  }

  void CheckNccl(const std::string& name, const std::string& value) {
    const std::string path =
        absl::StrCat("communication.nccl.", absl::Utf8SafeCEscape(name));
    absl::string_view rest = name;
    if (!absl::ConsumePrefix(&rest, "NCCL_") || rest.empty() ||
        !std::all_of(rest.begin(), rest.end(), [](char c) {
          return absl::ascii_isalnum(c) || c == '_';
        })) {
      Fault(path, "expected the name of a variable that begins with NCCL_");
    }
    if (value.find('\0') != std::string::npos) {
      Fault(path, "its value has a null byte");
    }
  }

  proto::Config& config_;
  const int world_size_;
  const ReadRecord& record_;
  std::vector<ConfigFault> faults_;
};

std::string Format(const ConfigFault& fault, absl::string_view file_name) {
  std::string text;
  if (fault.position) {
    absl::StrAppend(&text, FormatPosition(file_name, *fault.position), ": ");
  } else if (!file_name.empty()) {
    absl::StrAppend(&text, file_name, ": ");
  }
  if (!fault.path.empty()) absl::StrAppend(&text, fault.path, ": ");
  return absl::StrCat(text, fault.what);
}

// One line with all faults.
absl::Status ErrorOf(const std::vector<ConfigFault>& faults,
                     absl::string_view file_name) {
  return absl::InvalidArgumentError(absl::StrJoin(
      faults, "; ", [&](std::string* out, const ConfigFault& fault) {
        absl::StrAppend(out, Format(fault, file_name));
      }));
}

absl::StatusOr<proto::Config> Finish(proto::Config config, ReadRecord record,
                                     absl::string_view file_name,
                                     int world_size) {
  std::vector<ConfigFault> faults = std::move(record.faults);
  for (ConfigFault& fault : Resolver(&config, world_size, record).Resolve()) {
    faults.push_back(std::move(fault));
  }
  if (faults.empty()) return config;
  return ErrorOf(faults, file_name);
}

bool IsTextProto(absl::string_view file_name) {
  return absl::EndsWith(file_name, ".textproto") ||
         absl::EndsWith(file_name, ".pbtxt");
}

absl::Status Read(absl::string_view text, absl::string_view file_name,
                  proto::Config* config, ReadRecord* record) {
  if (IsTextProto(file_name)) {
    ReadProtoFromText(text, config, record);
    // Half a message: nothing sensible can be said about the rest.
    if (!record->faults.empty()) record->doubtful_paths.push_back("");
    return absl::OkStatus();
  }
  TESSERA_ASSIGN_OR_RETURN(const JsonValue root, ReadJson(text, file_name));
  ReadProtoFromJson(root, config, record);
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<proto::Communication> LoadCommunication(
    const std::string& path) {
  TESSERA_ASSIGN_OR_RETURN(const std::string text,
                           ReadWholeFile(path, kMaxFileBytes));
  proto::Config config;
  ReadRecord record;
  TESSERA_RETURN_IF_ERROR(Read(text, path, &config, &record));
  std::vector<ConfigFault> faults;
  for (const ConfigFault& fault : record.faults) {
    // Text that is no message at all has the empty path.
    if (Overlap(fault.path, "communication")) faults.push_back(fault);
  }
  for (ConfigFault& fault :
       Resolver(&config, /*world_size=*/1, record).ResolveCommunicationOnly()) {
    faults.push_back(std::move(fault));
  }
  if (!faults.empty()) return ErrorOf(faults, path);
  return config.communication();
}

absl::StatusOr<proto::Config> LoadConfig(const std::string& path,
                                         int world_size) {
  if (path.empty()) {
    return absl::InvalidArgumentError("the configuration's path is empty");
  }
  TESSERA_ASSIGN_OR_RETURN(const std::string text,
                           ReadWholeFile(path, kMaxFileBytes));
  return ParseConfig(text, path, world_size);
}

absl::StatusOr<proto::Config> ParseConfig(absl::string_view text,
                                          absl::string_view file_name,
                                          int world_size) {
  proto::Config config;
  ReadRecord record;
  TESSERA_RETURN_IF_ERROR(Read(text, file_name, &config, &record));
  return Finish(std::move(config), std::move(record), file_name, world_size);
}

absl::StatusOr<proto::Config> ResolveConfig(const proto::Config& config,
                                            int world_size) {
  return Finish(config, ReadRecord(), "", world_size);
}

}  // namespace tessera
