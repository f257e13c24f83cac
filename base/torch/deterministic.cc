#include "base/torch/deterministic.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <string>
#include <vector>

#include "ATen/Context.h"
#include "absl/base/const_init.h"
#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_set.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "base/torch/graph_nodes.h"
#include "c10/util/Exception.h"

namespace tessera {
namespace {

struct Switches {
  bool algorithms = false, warn_only = false;
  bool fill = true;
  bool cudnn_deterministic = false, cudnn_benchmark = false;

  static Switches Now() {
    const at::Context& context = at::globalContext();
    return {context.deterministicAlgorithms(),
            context.deterministicAlgorithmsWarnOnly(),
            context.deterministicFillUninitializedMemory(),
            context.deterministicCuDNN(), context.benchmarkCuDNN()};
  }
};

// Sets each switch to `to`'s value if it still has `from`'s.
void Change(const Switches& from, const Switches& to) {
  at::Context& context = at::globalContext();
  const Switches now = Switches::Now();
  if (now.algorithms == from.algorithms && now.warn_only == from.warn_only) {
    context.setDeterministicAlgorithms(to.algorithms, to.warn_only);
  }
  if (now.fill == from.fill) {
    context.setDeterministicFillUninitializedMemory(to.fill);
  }
  if (now.cudnn_deterministic == from.cudnn_deterministic) {
    context.setDeterministicCuDNN(to.cudnn_deterministic);
  }
  if (now.cudnn_benchmark == from.cudnn_benchmark) {
    context.setBenchmarkCuDNN(to.cudnn_benchmark);
  }
}

ABSL_CONST_INIT absl::Mutex g_mutex(absl::kConstInit);
int g_warning ABSL_GUARDED_BY(g_mutex) = 0;
int g_erring ABSL_GUARDED_BY(g_mutex) = 0;
Switches g_before ABSL_GUARDED_BY(g_mutex);  // before the first scope
Switches g_set ABSL_GUARDED_BY(g_mutex);     // what we set last

void AddScope(Determinism how, int change) {
  absl::MutexLock lock(&g_mutex);
  if (g_warning + g_erring == 0) g_before = g_set = Switches::Now();
  (how == Determinism::kErrors ? g_erring : g_warning) += change;
  Switches wanted = g_before;
  if (g_warning + g_erring > 0) {
    const bool was_strict = g_before.algorithms && !g_before.warn_only;
    wanted.algorithms = true;
    wanted.warn_only = g_erring == 0 && !was_strict;
    wanted.fill = g_before.algorithms && g_before.fill;
    wanted.cudnn_deterministic = true;
    wanted.cudnn_benchmark = false;
  }
  Change(g_set, wanted);
  g_set = wanted;
}

}  // namespace

// libtorch warns at each call, and in C++ nothing limits that.
//
// A handler passes warnings on to the one that it replaced. A replaced handler
// may come back (a user's guard that was opened while a scope lived restores
// it) or be called by a user's own. So it lives for ever, does nothing while no
// scope of it lives, and never replaces another one again.
class DeterministicScope::WarnsOnce final : public c10::WarningHandler {
 public:
  // Begins for one more scope on this thread.
  static WarnsOnce* Begin() {
    thread_local WarnsOnce* own = nullptr;
    c10::WarningHandler* const now = c10::WarningUtils::get_warning_handler();
    if (own == nullptr || (own->scopes_ == 0 && own != now)) {
      own = Made(now);
      c10::WarningUtils::set_warning_handler(own);
    }
    if (own->scopes_.fetch_add(1) == 0) own->seen_.clear();
    return own;
  }
  // Ends for one scope. Any thread may call it: handlers are per thread, so on
  // another thread it stays installed.
  void End() {
    if (scopes_.fetch_sub(1) > 1) return;
    if (c10::WarningUtils::get_warning_handler() != this) return;
    c10::WarningUtils::set_warning_handler(next_);
  }
  void process(const c10::Warning& warning) override {
    if (scopes_ > 0 && absl::StrContains(warning.msg(), "deterministic") &&
        !seen_.insert(warning.msg()).second) {
      return;
    }
    next_->process(warning);
  }

 private:
  explicit WarnsOnce(c10::WarningHandler* next) : next_(next) {}
  static WarnsOnce* Made(c10::WarningHandler* next) {
    static auto* const all = new std::vector<WarnsOnce*>;
    absl::MutexLock lock(&g_mutex);
    all->push_back(new WarnsOnce(next));
    return all->back();
  }

  c10::WarningHandler* const next_;
  std::atomic<int> scopes_ = 0;
  absl::flat_hash_set<std::string> seen_;  // used by its thread only
};

DeterministicScope::DeterministicScope(Determinism how)
    : how_(how), warns_(WarnsOnce::Begin()) {
  AddScope(how_, 1);
}

DeterministicScope::~DeterministicScope() {
  warns_->End();
  AddScope(how_, -1);
}

absl::Status SetDeterministicCublas() {
  constexpr char kName[] = "CUBLAS_WORKSPACE_CONFIG";
  (void)setenv(kName, ":4096:8", /*overwrite=*/0);
  const char* const value = std::getenv(kName);
  const std::string text = value == nullptr ? "" : value;
  if (text == ":4096:8" || text == ":16:8") return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      kName, " is '", text,
      "', with which cuBLAS may give other bits from run to run: unset it, or "
      "set it to :4096:8 (or :16:8, less memory), before the program starts"));
}

std::vector<std::string> UnorderedBackwards(const at::Tensor& loss) {
  struct Operator {
    const char *node, *name;
  };
  // The fused attentions. With kErrors libtorch takes their ordered backward,
  // or another attention.
  static constexpr Operator kOperators[] = {
      {"ScaledDotProductCudnnAttentionBackward0",
       "aten::_scaled_dot_product_cudnn_attention"},
      {"ScaledDotProductFlashAttentionBackward0",
       "aten::_scaled_dot_product_flash_attention"},
      {"ScaledDotProductEfficientAttentionBackward0",
       "aten::_scaled_dot_product_efficient_attention"},
      {"CudnnAttentionBackward0", "aten::_cudnn_attention_forward"},
      {"FlashAttentionBackward0", "aten::_flash_attention_forward"},
      {"EfficientAttentionBackward0", "aten::_efficient_attention_forward"},
  };
  std::vector<std::string> found;
  VisitNodes(loss, [&](const torch::autograd::Node& node) {
    const std::string name = node.name();
    for (const Operator& op : kOperators) {
      const bool known =
          std::find(found.begin(), found.end(), op.name) != found.end();
      if (name == op.node && !known) found.emplace_back(op.name);
    }
    return true;
  });
  return found;
}

}  // namespace tessera
