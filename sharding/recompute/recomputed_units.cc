// Why a module that is used without gradients does not begin a region: an
// evaluation saves nothing; but one that does so within its own region (a
// torch::autograd::Function's forward) does not end it.
#include "sharding/recompute/recomputed_units.h"

#include <algorithm>
#include <utility>

#include "ATen/core/grad_mode.h"
#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "base/log.h"
#include "base/shared_mutex.h"
#include "base/torch_guard.h"
#include "c10/core/InferenceMode.h"
#include "sharding/construct/construction.h"
#include "torch/csrc/autograd/graph_task.h"

namespace tessera {

// What the modules of an engine share; lives as long as their regions.
class RecomputedUnits::Shared : public std::enable_shared_from_this<Shared> {
 public:
  explicit Shared(RecomputeOptions options) : options(std::move(options)) {}

  // Keeps so many bytes beside those that are: until what it gives is gone.
  // Null: they are too many.
  std::shared_ptr<void> TryKeep(int64_t bytes) {
    {
      absl::MutexLock lock(&mutex);
      if (kept_bytes + bytes > options.budget_bytes) return nullptr;
      kept_bytes += bytes;
    }
    return std::shared_ptr<void>(this,
                                 [shared = shared_from_this(), bytes](void*) {
                                   absl::MutexLock lock(&shared->mutex);
                                   shared->kept_bytes -= bytes;
                                 });
  }

  const RecomputeOptions options;
  const std::shared_ptr<RestoredRegions> restored =
      std::make_shared<RestoredRegions>();
  std::atomic<int64_t> backwards{0};  // begun
  absl::Mutex mutex;
  int64_t kept_bytes ABSL_GUARDED_BY(mutex) = 0;  // of the budget
  RecomputeReport report ABSL_GUARDED_BY(mutex);
};

class RecomputedUnits::Module {
 public:
  Module(std::string name, std::shared_ptr<Shared> shared)
      : name_(std::move(name)), shared_(std::move(shared)) {}
  const std::string& name() const { return name_; }
  void AddFlat(const FlatParameter* flat) { flats_.insert(flat); }

  std::shared_ptr<Region> NewRegion(OutsideTensors* outside) const {
    return std::make_shared<Region>(name_, shared_->options.keeps, outside,
                                    shared_->restored);
  }
  bool is_kept() const { return is_kept_; }
  int64_t backwards() const { return shared_->backwards; }

  // `region`, of this module, ends. May throw.
  void Close(Region* region) {
    const int64_t bytes = region->Prepare();
    if (!region->spoilt().empty()) Keep(region->spoilt());
    std::shared_ptr<void> token;
    if (bytes > 0 && !is_kept_) {
      token = shared_->TryKeep(bytes);
      if (token == nullptr && Check(region)) return GiveUp(region, bytes);
    }
    KeepAll(region, bytes, token);
  }
  void KeepAll(Region* region, int64_t bytes,
               const std::shared_ptr<void>& token) {
    region->KeepAll(token);
    if (bytes == 0) return;
    absl::MutexLock lock(&shared_->mutex);
    ++shared_->report.kept;
  }

 private:
  // Whether its tape makes what the forward made.
  bool Check(Region* region) {
    const ReplayChecks checks = shared_->options.checks;
    if (checks == ReplayChecks::kNever) return true;
    bool is_first;
    {
      absl::MutexLock lock(&shared_->mutex);
      is_first = verified_.empty();
      if (verified_.contains(region->signature()) &&
          checks == ReplayChecks::kFirst) {
        return true;
      }
    }
    if (!is_first && MayGather()) return false;
    const absl::Status same = region->Verify();
    if (!same.ok() && !OfTheModule(same)) ThrowIfError(same);
    if (!same.ok()) Keep(same.message());
    absl::MutexLock lock(&shared_->mutex);
    verified_.insert(region->signature());
    return same.ok();
  }

  // What a peer, the memory or a deadline does is not the module's fault.
  static bool OfTheModule(const absl::Status& error) {
    return !absl::IsUnavailable(error) && !absl::IsResourceExhausted(error) &&
           !absl::IsDeadlineExceeded(error) && !absl::IsAborted(error) &&
           !absl::IsCancelled(error);
  }

  // Its parameters may have to be gathered, together with the other ranks.
  bool MayGather() const {
    return std::any_of(flats_.begin(), flats_.end(),
                       [](const FlatParameter* flat) {
                         return flat->can_be_freed() &&
                                flat->gathers_together() && !flat->whole();
                       });
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
  absl::flat_hash_set<const FlatParameter*> flats_;  // while the engine lives
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

  ~ThreadUnits() override {
    if (OperatorWatch::Current() != this) return;
    SetWatch(nullptr);
    FollowAll(false);
  }

  void Used(const StorageOwner& owned) {
    OperatorWatch* const current = OperatorWatch::Current();
    if (current != nullptr && current != this) return;
    if (within() || InBackward() || ReplayMark::IsSet()) return;
    if (Construction::Current() != nullptr) return;
    ForgetOld();
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
    if (InBackward() || Construction::Current() != nullptr) return false;
    ForgetOld();
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
    ForgetOld();
    return region_ == nullptr ? nullptr : region_->Save(tensor, alias);
  }
  void BeforeWriteElsewhere(const at::Tensor& tensor) override {
    outside_.BeforeWrite(tensor);
    if (region_ != nullptr) region_->WrittenElsewhere(tensor);
  }
  void Failed() override {
    if (region_ != nullptr) region_->Failed();
  }

  // No forward goes on.
  void EndForward() {
    KeepOpen();
    if (OperatorWatch::Current() != this) return;
    SetWatch(nullptr);
    if (Construction::Current() == nullptr) FollowAll(false);
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
    backwards_ = module->backwards();
    SetWatch(this);
    FollowAll(true);
  }
  void Close() {
    if (region_ == nullptr) return;
    const std::shared_ptr<Region> region = std::move(region_);
    std::exchange(module_, nullptr)->Close(region.get());
  }

  void KeepOpen() {
    if (region_ == nullptr) return;
    const std::shared_ptr<Region> region = std::move(region_);
    const int64_t bytes = region->Prepare();
    std::exchange(module_, nullptr)->KeepAll(region.get(), bytes, nullptr);
  }
  // A backward has begun on another thread since.
  void ForgetOld() {
    if (region_ != nullptr && backwards_ != module_->backwards()) KeepOpen();
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
  int64_t backwards_ = 0;           // of the engine, when it was opened
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
  modules_.back()->AddFlat(flat);
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

void RecomputedUnits::EndForward() {
  ++shared_->backwards;
  ThreadUnits::OfThread().EndForward();
}

void RecomputedUnits::EndBackward() { shared_->restored->DropAll(); }

RecomputeReport RecomputedUnits::TakeReport() {
  absl::MutexLock lock(&shared_->mutex);
  RecomputeReport report = shared_->report;
  if (!told_ && report.given_up == 0 && report.kept > 0 &&
      report.unable.empty() && shared_->options.budget_bytes == 0) {
    told_ = true;
    TESSERA_LOG(WARNING)
        << "activation_checkpointing: nothing is computed again: the module "
           "whose forward is the last before Backward keeps its activations, "
           "and there is no other";
  }
  shared_->report.given_up = 0;
  shared_->report.kept = 0;
  shared_->report.given_up_bytes = 0;
  return report;
}

}  // namespace tessera
