// Why a module that is used without gradients does not begin a region: an
// evaluation saves nothing; but one that does so within its own region (a
// torch::autograd::Function's forward) does not end it.
#include "sharding/recompute/recomputed_units.h"

#include <utility>

#include "ATen/core/grad_mode.h"
#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "base/log.h"
#include "base/shared_mutex.h"
#include "c10/core/InferenceMode.h"
#include "torch/csrc/autograd/graph_task.h"

namespace tessera {

// What the modules of an engine share; lives as long as their regions.
class RecomputedUnits::Shared {
 public:
  explicit Shared(RecomputeOptions options) : options(std::move(options)) {}

  // Whether so many bytes may be kept beside those that are.
  bool TryKeep(int64_t bytes) {
    absl::MutexLock lock(&mutex);
    if (kept_bytes + bytes > options.budget_bytes) return false;
    kept_bytes += bytes;
    return true;
  }

  const RecomputeOptions options;
  absl::Mutex mutex;
  int64_t kept_bytes ABSL_GUARDED_BY(mutex) = 0;  // of the budget
  RecomputeReport report ABSL_GUARDED_BY(mutex);
};

class RecomputedUnits::Module {
 public:
  Module(std::string name, std::shared_ptr<Shared> shared)
      : name_(std::move(name)), shared_(std::move(shared)) {}
  const std::string& name() const { return name_; }

  std::shared_ptr<Region> NewRegion(OutsideTensors* outside) const {
    return std::make_shared<Region>(name_, shared_->options.keeps, outside);
  }
  bool is_kept() const { return is_kept_; }

  // `region`, of this module, ends.
  void Close(Region* region) {
    const int64_t bytes = region->Prepare();
    if (!region->spoilt().empty()) Keep(region->spoilt());
    if (bytes > 0 && !is_kept_ && !shared_->TryKeep(bytes)) {
      const absl::Status same = Check(*region);
      if (same.ok()) return GiveUp(region, bytes);
      Keep(same.message());
    }
    KeepAll(region);
  }
  void KeepAll(Region* region) {
    region->KeepAll();
    absl::MutexLock lock(&shared_->mutex);
    ++shared_->report.kept;
  }

 private:
  absl::Status Check(const Region& region) {
    const ReplayChecks checks = shared_->options.checks;
    if (checks == ReplayChecks::kNever) return absl::OkStatus();
    {
      absl::MutexLock lock(&shared_->mutex);
      const bool is_new = verified_.insert(region.signature()).second;
      if (!is_new && checks == ReplayChecks::kFirst) return absl::OkStatus();
    }
    return region.Verify();
  }

  void GiveUp(Region* region, int64_t bytes) {
    region->GiveUp();
    absl::MutexLock lock(&shared_->mutex);
    ++shared_->report.given_up;
    shared_->report.given_up_bytes += bytes;
  }

  void Keep(absl::string_view why) {
    if (is_kept_.exchange(true)) return;
    const std::string text = absl::StrCat("[", name_, "] ", why);
    TESSERA_LOG(WARNING) << text
                         << "; its activations are kept (leave it out of "
                            "activation_checkpointing.units, or use "
                            "tessera::Checkpointed)";
    absl::MutexLock lock(&shared_->mutex);
    shared_->report.unable.push_back(text);
  }

  const std::string name_;
  const std::shared_ptr<Shared> shared_;
  std::atomic<bool> is_kept_{false};
  absl::flat_hash_set<uint64_t> verified_;  // by shared_->mutex
};

namespace {

using Module = RecomputedUnits::Module;
using Key = std::pair<const FlatParameter*, int>;

// The modules of all engines of the process, by parameter.
struct Modules {
  static Modules& Global() {
    static auto* const modules = new Modules;
    return *modules;
  }
  SharedMutex mutex;
  // Null: of several modules.
  absl::flat_hash_map<Key, std::shared_ptr<Module>> by_parameter
      ABSL_GUARDED_BY(mutex);

  // False: its use begins and ends no region.
  bool Find(const StorageOwner& owned, std::shared_ptr<Module>* module) {
    SharedMutexReaderLock lock(&mutex);
    const auto it = by_parameter.find({owned.flat.get(), owned.slot});
    if (it == by_parameter.end()) return true;
    *module = it->second;
    return *module != nullptr;
  }
};

// The open region of a thread.
class ThreadUnits final : public OperatorWatch {
 public:
  static ThreadUnits& OfThread() {
    thread_local ThreadUnits units;
    return units;
  }

  void Used(const StorageOwner& owned) {
    OperatorWatch* const current = OperatorWatch::Current();
    if (current != nullptr && current != this) return;
    if (within() || InBackward() || ReplayMark::IsSet()) return;
    std::shared_ptr<Module> module;
    if (!Modules::Global().Find(owned, &module)) return;
    const bool same = module == module_ && !BeginsAnew(owned);
    if (region_ != nullptr && same) return;
    if (region_ == nullptr && module == nullptr) return;
    if (!RecordsGradients()) {
      if (module != module_) Close();
      return;
    }
    Close();
    if (module == nullptr || module->is_kept()) return;
    Open(module, owned);
  }

  bool Begin(const c10::OperatorHandle& op, const OperatorInfo& info,
             torch::jit::Stack* stack) override {
    if (InBackward()) return false;
    const size_t n = info.writes.size();
    for (size_t i = 0; i < n; ++i) {
      if (info.writes[i]) NoteWrite((*stack)[stack->size() - n + i]);
    }
    return region_ != nullptr && region_->Begin(op, info, *stack);
  }
  void End(const c10::OperatorHandle& op, const OperatorInfo& info,
           torch::jit::Stack* stack) override {
    if (region_ != nullptr) region_->End(op, info, *stack);
  }
  std::shared_ptr<SavedSlot> Save(const at::Tensor& tensor,
                                  const at::Tensor& alias) override {
    if (region_ == nullptr || InBackward()) return nullptr;
    return region_->Save(tensor, alias);
  }

  // No forward goes on.
  void EndForward() {
    if (region_ != nullptr) {
      region_->Prepare();
      std::exchange(module_, nullptr)->KeepAll(region_.get());
      region_.reset();
    }
    outside_.Clear();
    if (OperatorWatch::Current() != this) return;
    SetWatch(nullptr);
    FollowAll(false);
  }

 private:
  static bool InBackward() {
    return torch::autograd::get_current_graph_task_id() != -1;
  }
  static bool RecordsGradients() {
    return at::GradMode::is_enabled() && !c10::InferenceMode::is_enabled();
  }
  bool BeginsAnew(const StorageOwner& owned) const {
    return region_ != nullptr && region_->num_operators() > 0 &&
           !in_composite() && owned.flat.get() == first_.first &&
           owned.slot == first_.second;
  }

  void Open(const std::shared_ptr<Module>& module, const StorageOwner& owned) {
    module_ = module;
    first_ = {owned.flat.get(), owned.slot};
    region_ = module->NewRegion(&outside_);
    SetWatch(this);
    FollowAll(true);
  }
  void Close() {
    if (region_ == nullptr) return;
    const std::shared_ptr<Region> region = std::move(region_);
    std::exchange(module_, nullptr)->Close(region.get());
  }

  void NoteWrite(const c10::IValue& value) {
    if (value.isTensor()) {
      outside_.BeforeWrite(value.toTensor());
    } else if (value.isTensorList()) {
      for (const at::Tensor& t : value.toTensorVector()) {
        outside_.BeforeWrite(t);
      }
    }
  }

  std::shared_ptr<Region> region_;  // null: none is open
  std::shared_ptr<Module> module_;  // of it
  Key first_{nullptr, 0};           // its first parameter
  OutsideTensors outside_;
};

class Uses final : public ParameterUses {
 public:
  void Used(const StorageOwner& owned) override {
    ThreadUnits::OfThread().Used(owned);
  }
};

}  // namespace

RecomputedUnits::RecomputedUnits(RecomputeOptions options)
    : shared_(std::make_shared<Shared>(std::move(options))) {
  static const bool installed = [] {
    SetParameterUses(new Uses);
    return true;
  }();
  (void)installed;
}

RecomputedUnits::~RecomputedUnits() {
  EndForward();
  Modules& all = Modules::Global();
  SharedMutexLock lock(&all.mutex);
  for (const auto& parameter : parameters_) all.by_parameter.erase(parameter);
}

void RecomputedUnits::Add(const std::string& name, const FlatParameter* flat,
                          int slot) {
  if (modules_.empty() || modules_.back()->name() != name) {
    modules_.push_back(std::make_shared<Module>(name, shared_));
  }
  Enter(modules_.back(), flat, slot);
}

void RecomputedUnits::AddShared(const FlatParameter* flat, int slot) {
  Enter(nullptr, flat, slot);
}

void RecomputedUnits::Enter(std::shared_ptr<Module> module,
                            const FlatParameter* flat, int slot) {
  parameters_.emplace_back(flat, slot);
  Modules& all = Modules::Global();
  SharedMutexLock lock(&all.mutex);
  all.by_parameter[{flat, slot}] = std::move(module);
}

void RecomputedUnits::EndForward() { ThreadUnits::OfThread().EndForward(); }

void RecomputedUnits::EndBackward() {
  DropRestoredOfAll();
  absl::MutexLock lock(&shared_->mutex);
  shared_->kept_bytes = 0;
}

RecomputeReport RecomputedUnits::TakeReport() {
  absl::MutexLock lock(&shared_->mutex);
  RecomputeReport report = shared_->report;
  shared_->report.given_up = 0;
  shared_->report.kept = 0;
  shared_->report.given_up_bytes = 0;
  return report;
}

bool IsMatmulOrAttention(absl::string_view op) {
  static const auto* const names = new absl::flat_hash_set<absl::string_view>{
      "aten::mm",
      "aten::addmm",
      "aten::bmm",
      "aten::baddbmm",
      "aten::addbmm",
      "aten::mv",
      "aten::addmv",
      "aten::dot",
      "aten::linear",
      "aten::mkldnn_linear",
      "aten::_addmm_activation",
      "aten::convolution",
      "aten::mkldnn_convolution",
      "aten::_convolution",
      "aten::_scaled_dot_product_flash_attention_for_cpu",
      "aten::_scaled_dot_product_flash_attention",
      "aten::_scaled_dot_product_efficient_attention",
      "aten::_scaled_dot_product_cudnn_attention",
      "aten::_scaled_dot_product_fused_attention_overrideable"};
  return names->contains(op);
}

}  // namespace tessera
