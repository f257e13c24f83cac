#include "base/torch/deterministic.h"

#include <cstdlib>
#include <string>

#include "ATen/Context.h"
#include "absl/base/const_init.h"
#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_set.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
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

// Each switch becomes `to`'s where it is as `from` left it.
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
Switches g_before ABSL_GUARDED_BY(g_mutex);  // the first scope
Switches g_set ABSL_GUARDED_BY(g_mutex);     // by us, last

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

// libtorch warns at each call, which in C++ nothing makes fewer of.
class WarnsOnce final : public c10::WarningHandler {
 public:
  // The thread's own. Never freed: a scope may end on another thread.
  static WarnsOnce& OfThread() {
    thread_local WarnsOnce* const handler = new WarnsOnce;
    return *handler;
  }
  void Begin() {
    if (scopes_++ > 0) return;
    next_ = c10::WarningUtils::get_warning_handler();
    c10::WarningUtils::set_warning_handler(this);
  }
  void End() {
    if (scopes_ == 0 || --scopes_ > 0) return;
    if (c10::WarningUtils::get_warning_handler() != this) return;
    c10::WarningUtils::set_warning_handler(next_);
    seen_.clear();
  }
  void process(const c10::Warning& warning) override {
    if (absl::StrContains(warning.msg(), "deterministic") &&
        !seen_.insert(warning.msg()).second) {
      return;
    }
    next_->process(warning);
  }

 private:
  int scopes_ = 0;
  c10::WarningHandler* next_ = nullptr;
  absl::flat_hash_set<std::string> seen_;
};

}  // namespace

DeterministicScope::DeterministicScope(Determinism how) : how_(how) {
  AddScope(how_, 1);
  WarnsOnce::OfThread().Begin();
}

DeterministicScope::~DeterministicScope() {
  WarnsOnce::OfThread().End();
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

}  // namespace tessera
