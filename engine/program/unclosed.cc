#include "engine/program/unclosed.h"

#include <atomic>

namespace tessera {
namespace {

std::atomic<int64_t> g_unclosed{0};

}  // namespace

void NoteUnclosedEngine() { g_unclosed.fetch_add(1); }
int64_t TakeUnclosedEngines() { return g_unclosed.exchange(0); }

}  // namespace tessera
