#include "base/above/above_autograd.h"

#include <algorithm>
#include <array>
#include <cstddef>

#include "base/check.h"
#include "torch/library.h"

namespace tessera {
namespace {

struct Entry {
  AboveHandler handler = nullptr;
  int rank = 0;
};

struct Handlers {
  std::array<Entry, 4> all;
  size_t size = 0;
};

Handlers& GetHandlers() {
  static Handlers handlers;
  return handlers;
}

void OnOperator(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                torch::jit::Stack* stack) {
  const Handlers& handlers = GetHandlers();
  for (size_t i = 0; i < handlers.size; ++i) {
    if (handlers.all[i].handler(op, keys, stack)) return;
  }
  op.redispatchBoxed(BelowAbove(keys), stack);
}

TORCH_LIBRARY_IMPL(_, TESTING_ONLY_GenericWrapper, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&OnOperator>());
}

}  // namespace

bool AddAboveHandler(AboveHandler handler, int rank) {
  Handlers& handlers = GetHandlers();
  TESSERA_CHECK(handlers.size < handlers.all.size());
  handlers.all[handlers.size++] = {handler, rank};
  std::sort(handlers.all.begin(),
            handlers.all.begin() + static_cast<ptrdiff_t>(handlers.size),
            [](const Entry& a, const Entry& b) { return a.rank > b.rank; });
  return true;
}

}  // namespace tessera
