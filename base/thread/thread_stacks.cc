#include "base/thread/thread_stacks.h"

#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <execinfo.h>
#include <signal.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/debugging/symbolize.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/strip.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "base/file.h"
#include "base/thread/deadline.h"

namespace tessera {
namespace {

constexpr int kMaxFrames = 64;
// A running thread answers in microseconds; one that waits for a core needs a
// time slice or a few.
constexpr absl::Duration kAnswerTime = absl::Milliseconds(200);

// The one stack that is being asked for. The handler writes it only if the
// question is still the one that it was sent for, so a late answer to an
// earlier question is ignored. Never freed.
struct Slot {
  std::atomic<int> asked{0};
  std::atomic<int> answered{0};
  int num_frames = 0;
  void* frames[kMaxFrames];
};
Slot g_slot;
ABSL_CONST_INIT absl::Mutex g_mutex(absl::kConstInit);
int g_questions ABSL_GUARDED_BY(g_mutex) = 0;

int Signal() { return SIGRTMAX - 3; }

// glibc's backtrace() is used instead of absl's GetStackTrace, which follows
// frame pointers that optimised code does not keep. It unwinds by tables; from
// glibc 2.35 and libgcc 12 on it takes no lock, and with its library loaded
// before (see AllThreadStacks) it does not allocate.
void Record(int, siginfo_t* info, void*) {
  const int saved_errno = errno;
  const int question = info->si_value.sival_int;
  if (info->si_code == SI_QUEUE && info->si_pid == getpid() &&
      question == g_slot.asked.load()) {
    g_slot.num_frames = backtrace(g_slot.frames, kMaxFrames);
    g_slot.answered.store(question);
  }
  errno = saved_errno;
}

// Returns "" where there is no such file: the thread has ended.
std::string ReadAll(const std::string& path) {
  return ReadWholeFile(path).value_or("");
}

std::vector<pid_t> Threads() {
  std::vector<pid_t> threads;
  DIR* const dir = opendir("/proc/self/task");
  if (dir == nullptr) return threads;
  while (const dirent* entry = readdir(dir)) {
    int tid = 0;
    if (absl::SimpleAtoi(entry->d_name, &tid)) threads.push_back(tid);
  }
  closedir(dir);
  std::sort(threads.begin(), threads.end());
  return threads;
}

// Returns "S" for sleeping, "R" for running, "D" for stuck in the kernel, ...
std::string StateOf(pid_t tid) {
  const std::string stat =
      ReadAll(absl::StrCat("/proc/self/task/", tid, "/stat"));
  const size_t end = stat.rfind(") ");
  return end == std::string::npos ? "gone" : stat.substr(end + 2, 1);
}

bool Ask(pid_t tid, int question) {
  siginfo_t info = {};
  info.si_signo = Signal();
  info.si_code = SI_QUEUE;
  info.si_pid = getpid();
  info.si_uid = getuid();
  info.si_value.sival_int = question;
  return syscall(SYS_rt_tgsigqueueinfo, getpid(), tid, Signal(), &info) == 0;
}

std::string Frame(int number, void* address) {
  // A return address may be the first byte of the next function.
  char* const call = static_cast<char*>(address) - 1;
  char name[512] = "?";
  if (!absl::Symbolize(call, name, sizeof(name))) strcpy(name, "?");
  std::string text = absl::StrFormat("  #%d %p %s", number, address, name);
  Dl_info info = {};
  if (dladdr(call, &info) != 0 && info.dli_fname != nullptr) {
    const char* const slash = strrchr(info.dli_fname, '/');
    absl::StrAppendFormat(&text, " (%s+%#x)",
                          slash == nullptr ? info.dli_fname : slash + 1,
                          call - static_cast<char*>(info.dli_fbase));
  }
  return text + "\n";
}

// Returns the frames of `tid`, none if it does not answer by `deadline`.
std::vector<void*> FramesOf(pid_t tid, int question, Deadline deadline) {
  g_slot.asked = question;
  if (deadline.HasPassed() || !Ask(tid, question)) return {};
  const Deadline end = std::min(deadline, Deadline::After(kAnswerTime));
  while (g_slot.answered != question && !end.HasPassed()) {
    absl::SleepFor(absl::Microseconds(50));
  }
  // A late answer finds another question. One that is being written just now
  // takes microseconds more, and writes only addresses.
  if (g_slot.answered != question) {
    g_slot.asked = 0;
    return {};
  }
  // The frames of the handler and of the kernel's way back from it are left
  // out.
  return std::vector<void*>(g_slot.frames + std::min(2, g_slot.num_frames),
                            g_slot.frames + g_slot.num_frames);
}

}  // namespace

std::string AllThreadStacks(absl::Duration deadline) {
  const Deadline end = Deadline::After(deadline);
  absl::MutexLock lock(&g_mutex);
  void* own[kMaxFrames];
  const int num_own = backtrace(own, kMaxFrames);  // loads its library, too

  struct sigaction action = {};
  struct sigaction before = {};
  action.sa_sigaction = &Record;
  action.sa_flags = SA_SIGINFO | SA_RESTART | SA_ONSTACK;
  sigfillset(&action.sa_mask);
  if (sigaction(Signal(), &action, &before) != 0) return "no stacks\n";

  const pid_t self = static_cast<pid_t>(syscall(SYS_gettid));
  std::vector<std::vector<void*>> stacks;
  const std::vector<pid_t> threads = Threads();
  for (pid_t tid : threads) {
    stacks.push_back(tid == self ? std::vector<void*>(own, own + num_own)
                                 : FramesOf(tid, ++g_questions, end));
  }
  // Ignoring it discards what is still pending; its default would end us.
  signal(Signal(), SIG_IGN);
  sigaction(Signal(), &before, nullptr);

  std::string text;
  for (size_t i = 0; i < threads.size(); ++i) {
    std::string name =
        ReadAll(absl::StrCat("/proc/self/task/", threads[i], "/comm"));
    absl::StrAppend(&text, "thread ", threads[i], " \"",
                    absl::StripSuffix(name, "\n"), "\" ", StateOf(threads[i]),
                    threads[i] == self ? ", the one that writes this\n" : "\n");
    for (size_t f = 0; f < stacks[i].size(); ++f) {
      text += Frame(static_cast<int>(f), stacks[i][f]);
    }
    if (stacks[i].empty()) absl::StrAppend(&text, "  did not answer\n");
  }
  return text;
}

}  // namespace tessera
