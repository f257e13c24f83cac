#include "base/above/below_autograd.h"

#include "base/check.h"
#include "torch/library.h"

namespace tessera {
namespace {

thread_local BelowAutograd* t_current = nullptr;

void RunOperator(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                 torch::jit::Stack* stack) {
  if (t_current != nullptr) {
    t_current->RunBelow(op, keys, stack);
  } else {  // a thread that was given the keys alone
    op.redispatchBoxed(BelowBelow(keys), stack);
  }
}

TORCH_LIBRARY_IMPL(_, Fake, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&RunOperator>());
}

}  // namespace

BelowAutograd* BelowAutograd::Current() { return t_current; }

BelowAutograd::Scope::Scope(BelowAutograd* runner)
    : seen_(c10::DispatchKeySet(kBelowKey)) {
  TESSERA_CHECK(t_current == nullptr) << "they are not nested";
  t_current = runner;
}

BelowAutograd::Scope::~Scope() { t_current = nullptr; }

}  // namespace tessera
