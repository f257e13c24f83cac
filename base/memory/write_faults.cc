#include "base/memory/write_faults.h"

#include <signal.h>
#include <string.h>
#include <unistd.h>

#include <atomic>
#include <cstddef>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "base/check.h"

namespace tessera {

// The handler reads tables and must not lock: they are put at the front of a
// list and stay in it for ever. A table that has ended is empty; a list that
// the handler does not read keeps it for reuse.
struct WriteFaults::Table {
  std::atomic<const std::vector<Piece>*> pieces{nullptr};
  Table* next = nullptr;

  static std::atomic<Table*> first;
  static void Handle(int signal, siginfo_t* info, void* context);
  static Table* Take();
  static void Return(Table* table);

 private:
  struct Ended {
    static Ended& Global() {
      static auto* const ended = new Ended;
      return *ended;
    }
    absl::Mutex mutex;
    std::vector<Table*> tables ABSL_GUARDED_BY(mutex);
  };
};

std::atomic<WriteFaults::Table*> WriteFaults::Table::first{nullptr};

namespace {

struct sigaction g_before;
thread_local const char* t_culprit = nullptr;

constexpr char kCulprit[] = " It came from operator ";

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
  const bool sent = info->si_code <= 0;  // sent by a process: has no address
  const char* const where = static_cast<const char*>(info->si_addr);
  for (Table* table = first; !sent && table != nullptr; table = table->next) {
    const std::vector<Piece>* const pieces = table->pieces;
    if (pieces == nullptr) continue;
    for (const Piece& piece : *pieces) {
      if (where < piece.begin || where >= piece.end) continue;
      Write(piece.message.data(), piece.message.size());
      if (const char* const culprit = t_culprit) {
        Write(kCulprit, sizeof(kCulprit) - 1);
        Write(culprit, strlen(culprit));
      }
      Write("\n", 1);
    }
  }
  if ((g_before.sa_flags & SA_SIGINFO) != 0) {
    g_before.sa_sigaction(signal, info, context);
  } else if (g_before.sa_handler != SIG_DFL && g_before.sa_handler != SIG_IGN) {
    g_before.sa_handler(signal);
  } else {
    // The access is repeated, and ends the process.
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
  {
    Ended& ended = Ended::Global();
    absl::MutexLock lock(&ended.mutex);
    if (!ended.tables.empty()) {
      Table* const table = ended.tables.back();
      ended.tables.pop_back();
      return table;
    }
  }
  auto* const table = new Table;
  table->next = first;
  while (!first.compare_exchange_weak(table->next, table)) {
  }
  return table;
}

void WriteFaults::Table::Return(Table* table) {
  delete table->pieces.exchange(nullptr);
  Ended& ended = Ended::Global();
  absl::MutexLock lock(&ended.mutex);
  ended.tables.push_back(table);
}

WriteFaults::Culprit::Culprit(const char* name) : before_(t_culprit) {
  if (name != nullptr) t_culprit = name;
}

WriteFaults::Culprit::~Culprit() { t_culprit = before_; }

WriteFaults::WriteFaults(std::vector<Piece> pieces) : table_(Table::Take()) {
  table_->pieces = new std::vector<Piece>(std::move(pieces));
}

WriteFaults::~WriteFaults() { Table::Return(table_); }

}  // namespace tessera
