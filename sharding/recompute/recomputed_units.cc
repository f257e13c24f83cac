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
#include "sharding/recompute/outside_tensor.h"
#include "sharding/recompute/recomputed_module.h"
#include "sharding/recompute/region.h"
#include "torch/csrc/autograd/graph_task.h"

namespace tessera {

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
    if (region_ == nullptr || in_composite()) return false;
    // What came before was no part of a forward.
    if (!region_->spoilt().empty() && !region_->saved()) return true;
    // A region that keeps what it computes records no operators.
    const bool has_begun = region_->num_operators() > 0 || region_->saved();
    return has_begun && owned.flat.get() == first_.first &&
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

void RecomputedUnits::EndBackward() {
  shared_->computed->DropValues();
  if (shared_->options.store != nullptr) shared_->options.store->DropFetched();
}

RecomputeReport RecomputedUnits::TakeReport() {
  absl::MutexLock lock(&shared_->mutex);
  RecomputeReport report = shared_->report;
  if (!told_ && shared_->options.recomputes && report.given_up == 0 &&
      report.kept > 0 && report.unable.empty() &&
      shared_->options.budget_bytes == 0) {
    told_ = true;
    TESSERA_LOG(WARNING)
        << "activation_checkpointing: nothing is recomputed: the module "
           "whose forward is the last before Backward keeps its activations, "
           "and there is no other";
  }
  shared_->report.given_up = 0;
  shared_->report.kept = 0;
  shared_->report.given_up_bytes = 0;
  if (shared_->options.store == nullptr) return report;
  const ActivationStats moved = shared_->options.store->stats();
  report.moved_bytes = moved.bytes_out - shared_->moved.bytes_out;
  report.moved_back_bytes = moved.bytes_back - shared_->moved.bytes_back;
  shared_->moved = moved;
  return report;
}

}  // namespace tessera
