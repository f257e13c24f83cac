#include "sharding/torch/write_faults.h"

#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <cstddef>
#include <utility>

#include "base/check.h"

namespace tessera {

// Read by the handler, which must not lock: tables are put at the front of a
// list and stay in it for ever; one that has ended is empty and used again.
struct WriteFaults::Table {
  std::atomic<const std::vector<Piece>*> pieces{nullptr};
  std::atomic<bool> taken{true};
  Table* next = nullptr;

  static std::atomic<Table*> first;
  static void Handle(int signal, siginfo_t* info, void* context);
  static Table* Take();
};

std::atomic<WriteFaults::Table*> WriteFaults::Table::first{nullptr};

namespace {

struct sigaction g_before;

void Write(const char* text, size_t length) {
  while (length > 0) {
    const ssize_t written = write(STDERR_FILENO, text, length);
    if (written <= 0) return;
    text += written;
    length -= static_cast<size_t>(written);
  }
}

}  // namespace

void WriteFaults::Table::Handle(int signal, siginfo_t* info, void* context) {
  const bool sent = info->si_code <= 0;  // by a process: of no address
  const char* const where = static_cast<const char*>(info->si_addr);
  for (Table* table = first; !sent && table != nullptr; table = table->next) {
    const std::vector<Piece>* const pieces = table->pieces;
    if (pieces == nullptr) continue;
    for (const Piece& piece : *pieces) {
      if (where < piece.begin || where >= piece.end) continue;
      Write(piece.message.data(), piece.message.size());
      Write("\n", 1);
    }
  }
  if ((g_before.sa_flags & SA_SIGINFO) != 0) {
    g_before.sa_sigaction(signal, info, context);
  } else if (g_before.sa_handler != SIG_DFL && g_before.sa_handler != SIG_IGN) {
    g_before.sa_handler(signal);
  } else {
    // The access is made again, and ends the process.
    struct sigaction none {};
    none.sa_handler = SIG_DFL;
    sigaction(SIGSEGV, &none, nullptr);
    if (sent) raise(SIGSEGV);
  }
}

WriteFaults::Table* WriteFaults::Table::Take() {
  static const bool installed = [] {
    struct sigaction action {};
    action.sa_sigaction = &Table::Handle;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    TESSERA_CHECK_EQ(sigaction(SIGSEGV, &action, &g_before), 0);
    return true;
  }();
  (void)installed;
  for (Table* table = first; table != nullptr; table = table->next) {
    if (!table->taken.exchange(true)) return table;
  }
  auto* const table = new Table;
  table->next = first;
  while (!first.compare_exchange_weak(table->next, table)) {
  }
  return table;
}

WriteFaults::WriteFaults(std::vector<Piece> pieces) : table_(Table::Take()) {
  table_->pieces = new std::vector<Piece>(std::move(pieces));
}

WriteFaults::~WriteFaults() {
  delete table_->pieces.exchange(nullptr);
  table_->taken = false;
}

}  // namespace tessera
