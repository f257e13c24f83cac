#include "engine/observe/step_observer.h"

#include <unistd.h>

#include <cmath>
#include <cstddef>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/file.h"
#include "base/log.h"
#include "base/status.h"
#include "base/thread/wait_clock.h"
#include "base/trace/exposed.h"
#include "base/trace/trace_json.h"
#include "config/config.pb.h"
#include "engine/observe/device_peak.h"
#include "engine/observe/run_file.h"
#include "monitor/append_file.h"

namespace tessera {
namespace {

// As DeepSpeed's documentation has it; its own default is never.
constexpr int64_t kBreakdownEach = 10;

double UnixSeconds() {
  return absl::ToDoubleSeconds(absl::Now() - absl::UnixEpoch());
}

int64_t PrintEach(const proto::Config& config) {
  if (config.steps_per_print() > 0) return config.steps_per_print();
  return config.wall_clock_breakdown() ? kBreakdownEach : 0;
}

// By rank. COLLECTIVE.
absl::StatusOr<std::vector<std::string>> HostsOf(Communicator* comm) {
  char name[256] = {};
  if (::gethostname(name, sizeof(name) - 1) != 0) name[0] = '\0';
  return comm->AllGatherStrings(name, {"hosts of a run"});
}

int64_t ParametersOf(const ShardedModel& model) {
  int64_t numel = 0;
  for (const auto& flat : model.flats()) {
    for (const auto& p : flat->parameters()) {
      numel += p.part.has_value() ? p.part->WholeNumel() : p.tensor.numel();
    }
  }
  return numel;
}

// Peaks are those of 16 bits.
bool ComputesIn16Bits(const proto::Config& config) {
  return config.bf16().enabled() || config.fp16().enabled() ||
         config.torch_autocast().enabled();
}

double PeakFlops(const proto::Config& config, at::Device device) {
  const double told = config.flops_profiler().peak_tflops();
  if (told > 0) return told * 1e12;
  if (device.is_cpu() || !ComputesIn16Bits(config)) return 0;
  return PeakFlopsOf(GpuModel());
}

// One prefix, then the rows as they are.
void LogTable(absl::string_view table) {
  TESSERA_LOG(INFO) << absl::StripSuffix(table, "\n");
}

std::string RunJsonPath(const proto::Config& config) {
  return JoinPath(RunFolder(config), "run.json");
}

// Returns "" for a file that cannot be read.
std::string TextOf(const std::string& path) {
  return ReadWholeFile(path).value_or("");
}

}  // namespace

StepObserver::StepObserver(const ShardedModel* model,
                           const proto::Config* config, Monitor* monitor,
                           bool writes)
    : model_(model),
      config_(*config),
      monitor_(monitor),
      rank_(model->comm()->rank()),
      writes_(writes),
      print_each_(PrintEach(*config)),
      breakdown_(config->wall_clock_breakdown()),
      data_wait_before_(DataWaitNanos()),
      exposed_before_(ExposedCommNanos()) {}

absl::StatusOr<std::unique_ptr<StepObserver>> StepObserver::Create(
    const ShardedModel* model, const proto::Config* config, Monitor* monitor,
    const StepObserverOptions& options) {
  monitor->parameters_ = ParametersOf(*model);
  monitor->peak_flops_ = PeakFlops(*config, model->device());
  // All ranks have to know, since all exchange the metrics of a step.
  TESSERA_ASSIGN_OR_RETURN(
      const std::vector<std::string> own,
      model->comm()->AllGatherStrings(options.writers.empty() ? "" : "own",
                                      CommTag{"the program's writers"}));
  const bool writes = MetricsOutputs::Wanted(*config) || !own[0].empty();
  if (!writes && PrintEach(*config) == 0 &&
      !config->flops_profiler().enabled() &&
      !config->comms_logger().enabled()) {
    return nullptr;
  }
  auto observer = std::unique_ptr<StepObserver>(
      new StepObserver(model, config, monitor, writes));
  TESSERA_RETURN_IF_ERROR(observer->Open(options));
  return observer;
}

absl::Status StepObserver::Open(const StepObserverOptions& options) {
  if (config_.comms_logger().verbose() && config_.comms_logger().enabled()) {
    TESSERA_RETURN_IF_ERROR(SetVerbosity("comm=2"));
  }
  RunDescription run;
  if (config_.jsonl_monitor().enabled()) {
    TESSERA_ASSIGN_OR_RETURN(run.hosts, HostsOf(model_->comm()));
  }
  absl::Status opened;
  if (rank_ == 0 && writes_) {
    absl::StatusOr<MetricsOutputs> outputs =
        MetricsOutputs::Open(config_, options.writers);
    opened = outputs.status();
    if (opened.ok() && config_.jsonl_monitor().enabled()) {
      run.start_unix_seconds = UnixSeconds();
      run.parameters = monitor_->parameters_;
      run.command = CommandText(TextOf("/proc/self/cmdline"));
      run.earlier = TextOf(RunJsonPath(config_));
      opened = Annotate(
          WriteFileAtomically(RunJsonPath(config_),
                              RunJson(*model_, config_, options.plan, run)),
          "jsonl_monitor.output_path");
      start_ = StartOf(*model_, run.start_unix_seconds);
    }
    if (opened.ok()) outputs_.emplace(*std::move(outputs));
  }
  if (writes_) {
    TESSERA_RETURN_IF_ERROR(
        model_->comm()->AgreeOk(opened, "Engine::Create: monitors"));
  }
  if (writes_ && config_.histograms().every_steps() > 0) {
    TESSERA_ASSIGN_OR_RETURN(
        ParameterHistograms histograms,
        ParameterHistograms::Create(model_, config_.histograms()));
    histograms_ = std::move(histograms);
  }
  monitor_->writes_ = outputs_.has_value();
  BeginProfile(0);
  return absl::OkStatus();
}

bool StepObserver::Prints(int64_t step) const {
  return print_each_ > 0 && step % print_each_ == 0;
}

void StepObserver::BeginProfile(int64_t updates) {
  const proto::FlopsProfiler& config = config_.flops_profiler();
  if (!config.enabled() || rank_ != 0 || profile_.has_value() ||
      updates < config.profile_step()) {
    return;
  }
  profile_.emplace();
  profile_->Start();
}

void StepObserver::EndForward() {
  const double forward = clock_.EndForward();
  if (!profile_.has_value() || !profile_->runs()) return;
  profile_->Stop(forward);
  FlopsProfileContext context;
  context.step = updates_ + 1;
  context.world_size = model_->comm()->world_size();
  context.parameters = monitor_->parameters_;
  context.micro_batches = config_.gradient_accumulation_steps();
  context.micro_batch_samples = config_.train_micro_batch_size_per_gpu();
  const proto::FlopsProfiler& config = config_.flops_profiler();
  const std::string table =
      FlopsTable(profile_->counts(), profile_->seconds(), context, config);
  if (config.output_file().empty()) return LogTable(table);
  const absl::Status written = WriteFileAtomically(config.output_file(), table);
  if (!written.ok()) {
    TESSERA_LOG(WARNING) << "flops_profiler.output_file: " << written.message();
  }
}

void StepObserver::AddLoss(const at::Tensor& loss, std::optional<double> weight,
                           bool another) {
  if (weight == 0.0) return;  // it may be anything
  losses_.Add(loss, weight.value_or(1));
  if (!another) loss_weight_ += weight.value_or(0);
}

RankMetrics StepObserver::RankMetricsOf(const StepTimes& times,
                                        const StepMemoryReport& memory) const {
  RankMetrics mine;
  const bool weighted = loss_weight_ > 0;
  const auto micro_batches =
      static_cast<double>(config_.gradient_accumulation_steps());
  mine.loss_weight = weighted        ? loss_weight_
                     : losses_.any() ? micro_batches
                                     : 0;
  mine.times = times;
  // The ranks of each other axis than dp have the same ones.
  const Mesh& mesh = model_->mesh();
  const bool counts = mesh.coordinate(kTp) == 0 && mesh.coordinate(kCp) == 0 &&
                      mesh.coordinate(kPp) == 0;
  mine.tokens = counts ? since_.tokens : 0;
  if (DataWaitIsTold()) {  // else the program has no loader that tells of it
    mine.data_wait =
        static_cast<double>(DataWaitNanos() - data_wait_before_) * 1e-9;
  }
  mine.exposed_comm =
      static_cast<double>(ExposedCommNanos() - exposed_before_) * 1e-9;
  mine.peak_bytes = static_cast<double>(memory.peak_bytes);
  mine.at_peak = memory.at_peak.held;
  return mine;
}

// Returns this rank's tokens, as the program has set them, and counts anew.
double StepObserver::TakeTokens() {
  const int64_t counted = std::exchange(monitor_->tokens_, 0);
  if (counted > 0) return static_cast<double>(counted);
  return static_cast<double>(monitor_->tokens_per_sample_ *
                             config_.train_batch_size()) /
         model_->mesh().size(kDp);
}

void StepObserver::EndStep(int64_t updates, int64_t step_at_most,
                           int64_t samples, const StepMemoryReport& memory) {
  updates_ = updates;
  // By the number that it has unless it was skipped, which all ranks know.
  const bool prints = Prints(step_at_most);
  const StepTimes times = clock_.EndStep();
  for (PrintInterval* interval : {&since_, &interval_}) {
    interval->Add(times, config_.train_batch_size());
  }
  since_.tokens += TakeTokens();
  // All ranks have come to the end of this step, so each may queue the same.
  for (Pending& pending : pending_) {
    if (!pending.exchange.started()) pending.exchange.Start(model_->comm());
  }
  if (writes_ || prints) {
    const RankMetrics mine = RankMetricsOf(times, memory);
    Pending pending{
        updates,       StepRecord(), RankExchange(mine, std::move(losses_)),
        StepMetrics(), since_,       std::nullopt};
    pending.record.samples = samples;
    pending.record.unix_seconds = UnixSeconds();
    if (prints) pending.print = std::exchange(interval_, {});
    // Not by whether this rank has its loss: one that had no data in this step
    // has none to wait for, and all are to queue the same.
    if (model_->device().is_cpu()) pending.exchange.Start(model_->comm());
    pending_.push_back(std::move(pending));
    since_ = {};
    data_wait_before_ = DataWaitNanos();
    exposed_before_ = ExposedCommNanos();
  }
  DropStep();
  BeginProfile(updates);
}

absl::Status StepObserver::AddHistograms(int64_t step,
                                         const Gradients& gradients,
                                         double divisor) {
  if (!histograms_.has_value() || !histograms_->IsDue(step)) {
    return absl::OkStatus();
  }
  TESSERA_ASSIGN_OR_RETURN(std::vector<StepMetrics::Values> made,
                           histograms_->Make(gradients, divisor));
  if (!outputs_.has_value()) return absl::OkStatus();
  for (StepMetrics::Values& each : made) {
    monitor_->added_.histograms.push_back(std::move(each));
  }
  return absl::OkStatus();
}

void StepObserver::DropStep() {
  losses_.Clear();
  loss_weight_ = 0;
}

void StepObserver::Complete(const StepReport& report, const RunPlace& place) {
  place_ = place;
  if (pending_.empty()) return;
  Pending& last = pending_.back();
  if (last.updates == updates_ && !last.completed) {
    last.completed = true;
    StepRecord& record = last.record;
    record.step = place.step;
    for (const StepReport::Group& group : report.groups) {
      record.groups.push_back({group.name, group.learning_rate});
    }
    record.grad_norm = report.grad_norm;
    record.loss_scale = report.loss_scale;
    record.has_loss_scale = config_.fp16().enabled();
    record.skipped = report.skipped;
    record.skipped_steps = report.skipped_steps;
    last.added = std::exchange(monitor_->added_, {});
  }
  while (!pending_.empty() && pending_.front().exchange.started()) {
    Finish(&pending_.front());
    pending_.pop_front();
  }
}

// With a profile by what was counted, else by the 6 operations that each
// parameter takes for each token (Kaplan et al., 2020).
void StepObserver::AddSpeed(const PrintInterval& since,
                            StepRecord* record) const {
  const double seconds = since.times.step;
  if (seconds <= 0) return;
  record->samples_per_second = static_cast<double>(since.samples) / seconds;
  record->tokens_per_second = record->tokens / seconds;
  if (profile_.has_value() && profile_->done()) {
    const double step =
        static_cast<double>(profile_->counts().total()) *
        static_cast<double>(config_.gradient_accumulation_steps()) *
        (3 + config_.flops_profiler().recompute_fwd_factor());
    record->tflops = step * static_cast<double>(since.steps) / seconds / 1e12;
  } else if (record->tokens > 0) {
    record->tflops = 6 * static_cast<double>(monitor_->parameters_) *
                     record->tokens_per_second / model_->comm()->world_size() /
                     1e12;
  }
  if (monitor_->peak_flops_ > 0) {
    record->mfu = record->tflops * 1e12 / monitor_->peak_flops_;
  }
}

void StepObserver::Finish(Pending* pending) {
  StepRecord& record = pending->record;
  AddRanks(pending->exchange.Finish(model_->comm()->world_size()), &record);
  AddSpeed(pending->since, &record);
  monitor_->last_ = std::make_shared<const StepRecord>(record);
  print_tokens_ += record.tokens;
  if (pending->print.has_value()) {
    pending->print->tokens = std::exchange(print_tokens_, 0);
    if (rank_ == 0) Print(record, *pending->print);
  }
  if (!outputs_.has_value()) return;
  StepMetrics metrics = MetricsOf(record);
  StepMetrics& added = pending->added;
  for (auto& scalar : added.scalars) metrics.scalars.push_back(scalar);
  metrics.texts = std::move(added.texts);
  metrics.histograms = std::move(added.histograms);
  outputs_->Write(metrics);
}

void StepObserver::Print(const StepRecord& record,
                         const PrintInterval& interval) {
  TESSERA_LOG(INFO) << ProgressLine(record, interval,
                                    config_.timers().throughput().enabled());
  if (breakdown_) TESSERA_LOG(INFO) << BreakdownLine(interval);
}

void StepObserver::Close() {
  for (Pending& pending : pending_) {
    if (!pending.exchange.started()) pending.exchange.Start(model_->comm());
  }
  End("closed");
}

// A run.json that another engine has written since is left alone.
void StepObserver::WriteEnd(absl::string_view how) {
  if (!start_.has_value()) return;
  const std::string text = WithEnd(TextOf(RunJsonPath(config_)), *start_,
                                   {how, UnixSeconds(), place_.step});
  if (text.empty()) return;
  const absl::Status written = WriteFileAtomically(RunJsonPath(config_), text);
  if (!written.ok()) {
    TESSERA_LOG(WARNING) << "the end of the run: " << written.message();
  }
}

void StepObserver::End(absl::string_view how) {
  if (std::exchange(ended_, true)) return;
  profile_.reset();
  for (Pending& pending : pending_) Finish(&pending);
  pending_.clear();
  // What was added since.
  StepMetrics& added = monitor_->added_;
  if (outputs_.has_value() && !(added.scalars.empty() && added.texts.empty() &&
                                added.histograms.empty())) {
    added.step = place_.step;
    added.samples = place_.samples;
    added.unix_seconds = UnixSeconds();
    outputs_->Write(std::exchange(added, {}));
  }
  if (outputs_.has_value()) outputs_->Flush();
  WriteEnd(how);
  if (config_.comms_logger().enabled() && rank_ == 0) {
    LogTable(model_->comm()->ShortReport());
  }
}

}  // namespace tessera
