// Why autograd must not keep the tensors themselves: a saved alias of a
// parameter has a pointer into the flat buffer, which is freed between forward
// and backward; a saved copy would hold every parameter whole until backward.
//
// Why an unpacked tensor's flat stays pinned until another node runs on the
// thread, and not only until the next operator: a node's code may take a raw
// pointer of what it unpacked and use it as long as it runs. Freed earlier, it
// would read what the next gather wrote there.
//
// Why the outermost graph task is found here: a hook cannot tell whether its
// backward runs within another (a reentrant checkpoint), after which more
// gradients of its parameter may come. libtorch numbers tasks when they start,
// so OutermostTask can only arm, and the first that starts then is the one.
#include "sharding/dispatch/saved_tensors.h"

#include <atomic>
#include <memory>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "base/step_memory/tensor_bytes.h"
#include "base/torch/placed_tensor.h"
#include "base/torch/saved_version.h"
#include "base/torch/storage_access.h"
#include "sharding/dispatch/backward_pins.h"
#include "sharding/dispatch/operator_watch.h"
#include "sharding/dispatch/saved_casts.h"
#include "sharding/flat/pins.h"
#include "sharding/flat/registry.h"
#include "torch/csrc/autograd/engine.h"
#include "torch/csrc/autograd/function.h"
#include "torch/csrc/autograd/graph_task.h"
#include "torch/csrc/autograd/saved_variable_hooks.h"
#include "torch/csrc/autograd/variable.h"

namespace tessera {
namespace {

namespace autograd = torch::autograd;

// Pins of the node that a thread is running.
class NodePins {
 public:
  static NodePins& OfThread();

  void Add(const std::shared_ptr<FlatParameter>& flat) {
    auto node = autograd::get_current_node();
    absl::MutexLock lock(&mutex_);
    if (node != node_) {
      pins_.Clear();
      node_ = std::move(node);  // held, so that its address is not reused
    }
    pins_.Add(flat);
  }
  void Clear() {
    absl::MutexLock lock(&mutex_);
    pins_.Clear();
    node_.reset();
  }
  void ClearEnded() {
    const auto node = autograd::get_current_node();
    absl::MutexLock lock(&mutex_);
    if (node == node_) return;
    pins_.Clear();
    node_.reset();
  }

 private:
  absl::Mutex mutex_;
  PinSet pins_ ABSL_GUARDED_BY(mutex_);
  std::shared_ptr<autograd::Node> node_ ABSL_GUARDED_BY(mutex_);
};

// All threads' NodePins; kept for the life of the process, as device threads
// are.
struct AllNodePins {
  absl::Mutex mutex;
  std::vector<std::shared_ptr<NodePins>> all ABSL_GUARDED_BY(mutex);
  static AllNodePins& Global() {
    static AllNodePins* pins = new AllNodePins();
    return *pins;
  }
};

NodePins& NodePins::OfThread() {
  thread_local std::shared_ptr<NodePins> mine = [] {
    auto pins = std::make_shared<NodePins>();
    auto& global = AllNodePins::Global();
    absl::MutexLock lock(&global.mutex);
    global.all.push_back(pins);
    return pins;
  }();
  return *mine;
}

// One saved tensor. Keeps an alias without history (no cycle through an
// output's grad_fn) that shares the version counter; nothing of a parameter's
// cast; what the thread's watch gives instead, if there is one.
class SavedTensor : public autograd::SavedVariableHooks {
 public:
  void call_pack_hook(const at::Tensor& tensor) override {
    cast_ = SavedCast::Of(tensor);
    if (cast_ != nullptr) return;
    alias_ = AliasOf(tensor);
    version_ = SavedVersion(tensor);
    if (StorageOwner owned = Registry::Global().Find(alias_)) {
      AddTag(alias_);
      memory_unit_ = owned.flat->memory_unit(owned.slot);
      flat_ = owned.flat;
    } else if (auto* const watch = OperatorWatch::Current()) {
      slot_ = watch->Save(tensor, alias_);
      if (slot_ != nullptr) alias_.reset();
    }
  }

  at::Tensor call_unpack_hook() override {
    if (cast_ != nullptr) {
      cast_->CheckVersions();
      NodePins::OfThread().Add(cast_->flat());
      return cast_->Make();
    }
    if (slot_ != nullptr) return slot_->Unpack();
    TORCH_CHECK(!version_.changed(), version_.Error(alias_));
    if (flat_ != nullptr) {
      NoteUnitUse(memory_unit_);
      NodePins::OfThread().Add(flat_);
    }
    return alias_;
  }

 private:
  std::unique_ptr<SavedCast> cast_;  // null: all that follows is set
  at::Tensor alias_;
  SavedVersion version_;
  int memory_unit_ = 0;                  // of flat_
  std::shared_ptr<FlatParameter> flat_;  // null: an ordinary tensor
  std::shared_ptr<SavedSlot> slot_;      // not null: instead of alias_
};

// Set by OutermostTask; -2: armed, the next graph task is the outermost.
constexpr int64_t kNone = -1, kArmed = -2;
std::atomic<int64_t> outermost_task{kNone};

class TaggingEngine final : public autograd::Engine {
 public:
  // libtorch starts worker threads (for devices, and for backwards nested too
  // deep) once per process, for the engine that runs first; a backward before
  // the first tessera::Engine has taken that. Ours then starts its own.
  TaggingEngine() {
    initialize_device_threads_pool();
    if (thread_pool_shared_ == nullptr) start_device_threads();
  }
  ~TaggingEngine() override { stop(); }

  std::unique_ptr<autograd::SavedVariableHooks>
  get_default_saved_variable_hooks() override {
    if (Registry::Global().empty() && OperatorWatch::Current() == nullptr) {
      return nullptr;
    }
    return std::make_unique<SavedTensor>();
  }

  c10::intrusive_ptr<at::ivalue::Future> execute_with_graph_task(
      const std::shared_ptr<autograd::GraphTask>& graph_task,
      std::shared_ptr<autograd::Node> graph_root,
      autograd::InputBuffer&& input_buffer) override {
    int64_t armed = kArmed;
    outermost_task.compare_exchange_strong(
        armed, static_cast<int64_t>(graph_task->id_));
    return autograd::Engine::execute_with_graph_task(
        graph_task, std::move(graph_root), std::move(input_buffer));
  }
};

autograd::Engine& TheEngine() {
  static TaggingEngine* engine = new TaggingEngine();  // its threads never end
  return *engine;
}

}  // namespace

void InstallSavedTensorHooks() {
  static const bool done = [] {
    autograd::set_default_engine_stub(&TheEngine);
    return true;
  }();
  (void)done;
}

void ReleaseNodePins() {
  BackwardPins::ReleaseAll();
  auto& global = AllNodePins::Global();
  absl::MutexLock lock(&global.mutex);
  for (auto& pins : global.all) pins->Clear();
}

void ReleaseEndedNodePins() { NodePins::OfThread().ClearEnded(); }

OutermostTask::OutermostTask() { outermost_task = kArmed; }
OutermostTask::~OutermostTask() { outermost_task = kNone; }
int64_t OutermostTask::id() { return outermost_task; }

}  // namespace tessera
