#include "tools/doctor.h"

#include <arpa/inet.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/statvfs.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <fstream>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "base/disk/disk_ring.h"
#include "base/isa.h"
#include "base/json.h"
#include "base/memory/available_memory.h"
#include "base/memory/memfd.h"
#include "base/system/system_limits.h"

namespace tessera {
namespace {

using Grade = Finding::Grade;

constexpr int64_t kGiB = int64_t{1} << 30;

std::string GiB(double bytes) {
  return absl::StrFormat("%.1f GiB", bytes / static_cast<double>(kGiB));
}

Finding Good(std::string what, std::string text) {
  return {Grade::kGood, std::move(what), std::move(text), ""};
}

Finding Processors() {
  cpu_set_t set;
  CPU_ZERO(&set);
  const int count =
      sched_getaffinity(0, sizeof(set), &set) == 0 ? CPU_COUNT(&set) : 0;
  const Isa isa = BestIsa();
  std::string text = absl::StrCat(count, " for this process, ", IsaName(isa));
  if (isa == Isa::kAvx512) return Good("processors", text);
  return {Grade::kSlow, "processors", text,
          "bf16 on the CPU is slow without AVX-512; fp32 is not"};
}

Finding Memory(const std::string& root) {
  const auto available = AvailableHostMemory(root);
  if (!available.ok()) {
    return {Grade::kBad, "memory", std::string(available.status().message()),
            "mount /proc"};
  }
  const std::string text =
      absl::StrCat(GiB(static_cast<double>(*available)), " can be taken");
  if (*available >= kGiB) return Good("memory", text);
  return {Grade::kSlow, "memory", text,
          "end other programs, or raise the limit of this container"};
}

// Ranks of one host share memory without a name.
Finding SharedMemory(const std::string& root) {
  const absl::StatusOr<int> fd = MakeMemfd("tessera doctor", 1 << 20, root);
  if (!fd.ok()) {
    return {Grade::kBad, "shared memory", std::string(fd.status().message()),
            "allow memfd_create (a filter of system calls forbids it?)"};
  }
  close(*fd);
  return Good("shared memory",
              StrictOvercommit(root) ? "works (accounted strictly)" : "works");
}

std::string LimitOr(int which, uint64_t unit, absl::string_view unlimited) {
  const std::string text = LimitText(which, unit);
  return text.empty() ? std::string(unlimited) : text;
}

Finding Descriptors() {
  rlimit limit = {};
  getrlimit(RLIMIT_NOFILE, &limit);
  const std::string text =
      absl::StrCat(LimitOr(RLIMIT_NOFILE, 1, "any number of"), " open files");
  if (limit.rlim_cur >= 1024) return Good("descriptors", text);
  return {Grade::kSlow, "descriptors", text,
          "raise it for many ranks: ulimit -n 4096"};
}

Finding LockedMemory() {
  rlimit limit = {};
  getrlimit(RLIMIT_MEMLOCK, &limit);
  const std::string text = absl::StrCat(
      LimitOr(RLIMIT_MEMLOCK, 1 << 20, "unlimited"),
      limit.rlim_cur == RLIM_INFINITY ? "" : " MiB", " may be locked");
  if (limit.rlim_cur >= 64 << 20) return Good("locked memory", text);
  return {Grade::kSlow, "locked memory", text,
          "io_uring maps its memory again each time: ulimit -l unlimited"};
}

// Ranks of one host meet there.
Finding Loopback() {
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  const bool listens =
      fd >= 0 &&
      bind(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0 &&
      listen(fd, 1) == 0;
  const std::string why = listens ? "" : std::strerror(errno);
  if (fd >= 0) close(fd);
  if (listens) return Good("network", "127.0.0.1 can be listened on");
  return {Grade::kBad, "network", NoLoopback(why), "see there"};
}

// Returns the version of CUDA's driver, and the names of its devices.
struct Cuda {
  int version = 0;
  std::vector<std::string> devices;
};
Cuda FindCuda() {
  Cuda cuda;
  void* const driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (driver == nullptr) return cuda;
  const auto call = [&](const char* name, auto*... args) {
    auto* const function =
        reinterpret_cast<int (*)(decltype(args)...)>(dlsym(driver, name));
    return function == nullptr ? -1 : function(args...);
  };
  auto* const init =
      reinterpret_cast<int (*)(unsigned)>(dlsym(driver, "cuInit"));
  auto* const name = reinterpret_cast<int (*)(char*, int, int)>(
      dlsym(driver, "cuDeviceGetName"));
  int count = 0;
  call("cuDriverGetVersion", &cuda.version);
  if (init == nullptr || name == nullptr || init(0) != 0 ||
      call("cuDeviceGetCount", &count) != 0) {
    return cuda;
  }
  for (int device = 0; device < count; ++device) {
    char text[128] = "";
    if (name(text, sizeof(text), device) == 0) cuda.devices.push_back(text);
  }
  return cuda;
}

Finding Devices() {
  const Cuda cuda = FindCuda();
  const std::string version =
      absl::StrCat("CUDA ", cuda.version / 1000, ".", cuda.version % 1000 / 10);
  if (cuda.version == 0) return Good("GPUs", "none: ranks train on the CPU");
  if (!cuda.devices.empty()) {
    return Good("GPUs", absl::StrCat(cuda.devices.size(), " (", cuda.devices[0],
                                     "), ", version));
  }
  return {Grade::kSlow, "GPUs",
          absl::StrCat("there is a driver of ", version, ", but no device"),
          "to train on GPUs, check nvidia-smi and CUDA_VISIBLE_DEVICES"};
}

// In a child: loading it takes time and memory, and may fail in its own ways.
bool CanLoad(const char* library) {
  const pid_t child = fork();
  if (child == 0) {
    _exit(dlopen(library, RTLD_LAZY | RTLD_LOCAL) == nullptr ? 1 : 0);
  }
  int status = 1;
  while (child > 0 && waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  return child > 0 && WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

Finding Libtorch() {
  if (CanLoad("libtorch_cpu.so")) {
    return Good("libtorch", "libtorch_cpu.so can be loaded");
  }
  return {Grade::kSlow, "libtorch",
          "libtorch_cpu.so is not found (`tessera plan` needs it)",
          "set LD_LIBRARY_PATH to lib/ of libtorch 2.11, or of the Python "
          "package torch"};
}

Finding IoUring() {
  if (DiskRing::Create(8) != nullptr) return Good("io_uring", "works");
  return {Grade::kSlow, "io_uring",
          "this kernel has none, or forbids it; a thread reads and writes",
          "allow it (kernel.io_uring_disabled, or the container's filter)"};
}

Finding Disk(const std::string& folder) {
  struct statvfs room = {};
  if (statvfs(folder.c_str(), &room) != 0) {
    return {Grade::kBad, "disk",
            absl::StrCat(folder, ": ", std::strerror(errno)),
            "give --dir a folder that is there"};
  }
  const double free =
      static_cast<double>(room.f_bavail) * static_cast<double>(room.f_frsize);
  std::string text = absl::StrCat(folder, " has ", GiB(free));
  const int written =
      open(folder.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
  const int direct =
      open(folder.c_str(), O_TMPFILE | O_RDWR | O_DIRECT | O_CLOEXEC, 0600);
  const int error = errno;
  if (written >= 0) close(written);
  if (direct >= 0) close(direct);
  if (direct >= 0) return Good("disk", text + ", unbuffered I/O works");
  if (written >= 0 || error == EOPNOTSUPP || error == EINVAL) {
    return {Grade::kSlow, "disk",
            absl::StrCat(text, ", without unbuffered I/O"),
            "use a local disk (ext4, xfs) for offload to nvme"};
  }
  return {Grade::kBad, "disk", absl::StrCat(text, ": ", std::strerror(error)),
          "give --dir a folder that can be written"};
}

const char* GradeName(Grade grade) {
  return grade == Grade::kGood ? "ok" : grade == Grade::kSlow ? "note" : "FAIL";
}

CommandCall::Color ColorOf(Grade grade) {
  return grade == Grade::kGood   ? CommandCall::Color::kGreen
         : grade == Grade::kSlow ? CommandCall::Color::kYellow
                                 : CommandCall::Color::kRed;
}

int RunDoctor(CommandCall* call) {
  const std::vector<Finding> findings = Examine(call->Get("--dir", "."));
  const bool json = call->Has("--json");
  std::vector<std::string> lines;
  bool bad = false;
  for (const Finding& finding : findings) {
    bad |= finding.grade == Grade::kBad;
    if (json) {
      lines.push_back(absl::StrCat(
          "{\"grade\": ", QuoteJson(GradeName(finding.grade)), ", \"what\": ",
          QuoteJson(finding.what), ", \"text\": ", QuoteJson(finding.text),
          ", \"advice\": ", QuoteJson(finding.advice), "}"));
      continue;
    }
    lines.push_back(absl::StrCat(
        call->InColor(ColorOf(finding.grade),
                      absl::StrFormat("%-5s", GradeName(finding.grade))),
        absl::StrFormat(" %-14s %s", finding.what, finding.text)));
    if (!finding.advice.empty()) {
      lines.push_back(
          absl::StrCat(std::string(21, ' '), "-> ", finding.advice));
    }
  }
  call->out() << (json ? "[" : "") << absl::StrJoin(lines, json ? ",\n " : "\n")
              << (json ? "]\n" : "\n");
  return bad ? 1 : 0;
}

}  // namespace

std::vector<Finding> Examine(const std::string& folder,
                             const std::string& root) {
  return {Processors(),   Memory(root), SharedMemory(root), Descriptors(),
          LockedMemory(), Loopback(),   Devices(),          Libtorch(),
          IoUring(),      Disk(folder)};
}

Command DoctorCommand() {
  return {
      "doctor",
      "",
      "Checks what this machine offers for training, and says what to change.",
      "It looks at processors, memory, limits, the loopback interface, "
      "GPUs, libtorch, io_uring and the disk of --dir. The exit status is "
      "1 if something is missing that training needs.",
      {{"--dir", "DIR",
        "Folder for checkpoints or offloaded states (the current folder)."},
       {"--json", "", "Prints JSON: [{grade, what, text, advice}]."}},
      {"doctor", "doctor --dir /mnt/nvme --json"},
      RunDoctor};
}

}  // namespace tessera
