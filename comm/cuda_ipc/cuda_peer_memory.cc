// Why memory and events are not freed with the group: CUDA leaves undefined
// what a process sees of memory or events that it has opened once their owner
// has freed them. So each rank closes the others' first, as soon as its stream
// has done its work, says so in memory that the ranks share, and frees its own
// when all have said so. Nobody waits for that: what is not over yet is looked
// at again whenever a group is made or ends. A rank that died never says so;
// its peers' memory then stays until their own end.
#include "comm/cuda_ipc/cuda_peer_memory.h"

#include <cuda_runtime.h>

#include <atomic>
#include <cstring>
#include <list>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/const_init.h"
#include "absl/base/thread_annotations.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "base/status.h"
#include "base/torch_guard.h"
#include "c10/cuda/CUDAGuard.h"
#include "c10/cuda/CUDAStream.h"
#include "comm/shared_memory.h"

namespace tessera {
namespace {

using Mark = PeerMemory::Mark;
constexpr int kSlots = PeerMemory::kSlots;
constexpr int kMarks = PeerMemory::kMarks;

constexpr absl::string_view kWhatToTry =
    "; backend cuda_ipc needs ranks on one GPU, or on GPUs of one host with "
    "peer access (nvidia-smi topo -p2p r) that every rank sees "
    "(CUDA_VISIBLE_DEVICES), no MIG instances, and processes in one pid and "
    "ipc "
    "namespace (containers: --pid=host --ipc=host, or one for all ranks); or "
    "take backend gloo, which carries GPU tensors through host memory";

absl::Status Check(cudaError_t error, absl::string_view what) {
  if (error == cudaSuccess) return absl::OkStatus();
  (void)cudaGetLastError();  // clears it, unless the device is lost
  const std::string text =
      absl::StrCat("cuda_ipc: ", what, ": ", cudaGetErrorString(error), " (",
                   cudaGetErrorName(error), ")");
  return error == cudaErrorMemoryAllocation ? absl::ResourceExhaustedError(text)
                                            : absl::UnavailableError(text);
}

// The memory and events of one rank, as it has made them or as another has
// opened them.
struct Part {
  char* memory = nullptr;  // kSlots slots
  cudaEvent_t events[kMarks][kSlots] = {};
};

// What a rank tells the others, as it lies in memory: all run one program.
struct Handles {
  cudaIpcMemHandle_t memory;
  cudaIpcEventHandle_t events[kMarks][kSlots];
};

// All that a rank has of a group.
struct Parts {
  c10::cuda::CUDAStream stream;
  int rank = 0;
  std::vector<Part> of;                  // by rank
  std::unique_ptr<SharedMemory> closed;  // a byte for each rank

  std::atomic<char>& has_closed(size_t r) const {
    return reinterpret_cast<std::atomic<char>*>(closed->writable())[r];
  }
};

void DestroyEvents(Part* part) {
  for (auto& events : part->events) {
    for (cudaEvent_t& event : events) {
      if (event != nullptr) (void)cudaEventDestroy(event);
      event = nullptr;
    }
  }
}

// Frees what can be freed by now; true if that is all.
bool Freed(Parts* parts) {
  const c10::cuda::CUDAGuard guard(parts->stream.device());
  const auto me = static_cast<size_t>(parts->rank);
  if (parts->has_closed(me) == 0) {
    if (cudaStreamQuery(parts->stream.stream()) != cudaSuccess) {
      (void)cudaGetLastError();
      return false;
    }
    for (size_t r = 0; r < parts->of.size(); ++r) {
      if (r == me) continue;
      if (parts->of[r].memory != nullptr) {
        (void)cudaIpcCloseMemHandle(parts->of[r].memory);
      }
      DestroyEvents(&parts->of[r]);
    }
    parts->has_closed(me) = 1;
  }
  for (size_t r = 0; r < parts->of.size(); ++r) {
    if (parts->has_closed(r) == 0) return false;
  }
  DestroyEvents(&parts->of[me]);
  if (parts->of[me].memory != nullptr) (void)cudaFree(parts->of[me].memory);
  (void)cudaGetLastError();
  return true;
}

ABSL_CONST_INIT absl::Mutex g_mutex(absl::kConstInit);

// Parts that are no longer used here. Never destroyed: at the end of a process
// CUDA may be gone already.
std::list<Parts>& Retired() ABSL_EXCLUSIVE_LOCKS_REQUIRED(g_mutex) {
  static auto* const retired = new std::list<Parts>;
  return *retired;
}

void FreeRetired() {
  absl::MutexLock lock(&g_mutex);
  Retired().remove_if([](Parts& parts) {
    // Where the device has failed nothing can be freed.
    return CatchTorch("cuda_ipc", [&] { return Freed(&parts); })
        .value_or(false);
  });
}

void Retire(Parts parts) {
  {
    absl::MutexLock lock(&g_mutex);
    Retired().push_back(std::move(parts));
  }
  FreeRetired();
}

class CudaPeerMemory : public PeerMemory {
 public:
  CudaPeerMemory(Parts parts, int64_t slot_bytes)
      : parts_(std::move(parts)), slot_bytes_(slot_bytes) {}
  ~CudaPeerMemory() override { Retire(std::move(parts_)); }

  int rank() const override { return parts_.rank; }
  int world_size() const override { return static_cast<int>(parts_.of.size()); }
  int64_t slot_bytes() const override { return slot_bytes_; }

  absl::Status Record(Mark mark, int slot) override {
    return Check(cudaEventRecord(event(rank(), mark, slot), stream()),
                 "cudaEventRecord");
  }
  absl::Status Await(int rank, Mark mark, int slot) override {
    return Check(cudaStreamWaitEvent(stream(), event(rank, mark, slot), 0),
                 "cudaStreamWaitEvent");
  }
  absl::Status Put(const void* from, int slot, int64_t at,
                   int64_t bytes) override {
    return Copy(from, of(rank(), slot) + at, bytes);
  }
  absl::Status Get(int rank, int slot, int64_t at, void* to,
                   int64_t bytes) override {
    return Copy(of(rank, slot) + at, to, bytes);
  }
  absl::Status Copy(const void* from, void* to, int64_t bytes) override {
    return Check(cudaMemcpyAsync(to, from, static_cast<size_t>(bytes),
                                 cudaMemcpyDeviceToDevice, stream()),
                 "cudaMemcpyAsync");
  }

 private:
  cudaStream_t stream() const { return parts_.stream.stream(); }
  cudaEvent_t event(int rank, Mark mark, int slot) const {
    return parts_.of[rank].events[static_cast<int>(mark)][slot];
  }
  char* of(int rank, int slot) const {
    return parts_.of[rank].memory + slot * slot_bytes_;
  }

  Parts parts_;
  const int64_t slot_bytes_;
};

// Marks are recorded once, so that none is awaited that never was.
absl::Status MakeOwn(c10::cuda::CUDAStream stream, int64_t slot_bytes,
                     Part* own, Handles* handles) {
  const c10::Device device = stream.device();
  int supported = 0;
  TESSERA_RETURN_IF_ERROR(
      Check(cudaDeviceGetAttribute(&supported, cudaDevAttrIpcEventSupport,
                                   device.index()),
            "cudaDevAttrIpcEventSupport"));
  if (supported == 0) {
    return absl::UnavailableError(
        absl::StrCat("cuda_ipc: ", device.str(),
                     " has no events for several processes", kWhatToTry));
  }
  TESSERA_RETURN_IF_ERROR(Check(
      cudaMalloc(reinterpret_cast<void**>(&own->memory),
                 static_cast<size_t>(kSlots * slot_bytes)),
      absl::StrCat("two slots of ", slot_bytes, " bytes on ", device.str())));
  TESSERA_RETURN_IF_ERROR(
      Annotate(Check(cudaIpcGetMemHandle(&handles->memory, own->memory),
                     "cudaIpcGetMemHandle"),
               "own memory"));
  for (int mark = 0; mark < kMarks; ++mark) {
    for (int slot = 0; slot < kSlots; ++slot) {
      cudaEvent_t& event = own->events[mark][slot];
      TESSERA_RETURN_IF_ERROR(
          Check(cudaEventCreateWithFlags(
                    &event, cudaEventDisableTiming | cudaEventInterprocess),
                "cudaEventCreateWithFlags"));
      TESSERA_RETURN_IF_ERROR(
          Check(cudaIpcGetEventHandle(&handles->events[mark][slot], event),
                "cudaIpcGetEventHandle"));
      TESSERA_RETURN_IF_ERROR(
          Check(cudaEventRecord(event, stream.stream()), "cudaEventRecord"));
    }
  }
  return absl::OkStatus();
}

absl::Status Open(const Handles& handles, Part* part) {
  TESSERA_RETURN_IF_ERROR(Check(
      cudaIpcOpenMemHandle(reinterpret_cast<void**>(&part->memory),
                           handles.memory, cudaIpcMemLazyEnablePeerAccess),
      "cudaIpcOpenMemHandle"));
  for (int mark = 0; mark < kMarks; ++mark) {
    for (int slot = 0; slot < kSlots; ++slot) {
      TESSERA_RETURN_IF_ERROR(
          Check(cudaIpcOpenEventHandle(&part->events[mark][slot],
                                       handles.events[mark][slot]),
                "cudaIpcOpenEventHandle"));
    }
  }
  return absl::OkStatus();
}

absl::Status OpenOthers(const std::vector<std::string>& texts, Parts* parts) {
  for (size_t r = 0; r < texts.size(); ++r) {
    if (static_cast<int>(r) == parts->rank) continue;
    const std::string bytes = absl::HexStringToBytes(texts[r]);
    Handles handles;
    if (bytes.size() != sizeof(handles)) {
      return absl::InternalError(
          absl::StrCat("cuda_ipc: handles of rank ", r, " have ", bytes.size(),
                       " bytes, expected ", sizeof(handles)));
    }
    std::memcpy(&handles, bytes.data(), sizeof(handles));
    const absl::Status opened = Open(handles, &parts->of[r]);
    if (!opened.ok()) {
      return absl::Status(
          opened.code(),
          absl::StrCat(opened.message(), ", of rank ", r, kWhatToTry));
    }
  }
  return absl::OkStatus();
}

}  // namespace

// Why in this order: a rank that cannot make or open what it needs comes to
// each agreement nevertheless, so that nobody waits for it; and nobody awaits a
// mark before all have opened it.
absl::StatusOr<std::shared_ptr<PeerMemory>> ConnectCudaPeers(
    Communicator* host, c10::Stream stream, int64_t slot_bytes) {
  FreeRetired();
  Parts parts{c10::cuda::CUDAStream(stream), host->rank(),
              std::vector<Part>(static_cast<size_t>(host->world_size())),
              nullptr};
  TESSERA_ASSIGN_OR_RETURN(
      parts.closed,
      host->ShareMemory(host->world_size(), CommTag("ends of cuda_ipc")));
  const auto me = static_cast<size_t>(parts.rank);
  Handles handles = {};
  absl::Status made = CatchTorch("cuda_ipc", [&] {
    const c10::cuda::CUDAGuard guard(stream.device());
    return MakeOwn(parts.stream, slot_bytes, &parts.of[me], &handles);
  });
  auto retire = [&](const absl::Status& why) {
    Retire(std::move(parts));
    return why;
  };
  made = host->AgreeOk(made, "memory of cuda_ipc");
  if (!made.ok()) return retire(made);
  const absl::StatusOr<std::vector<std::string>> texts = host->AllGatherStrings(
      absl::BytesToHexString(absl::string_view(
          reinterpret_cast<const char*>(&handles), sizeof(handles))),
      CommTag("handles of cuda_ipc"));
  if (!texts.ok()) return retire(texts.status());
  absl::Status opened = CatchTorch("cuda_ipc", [&] {
    const c10::cuda::CUDAGuard guard(stream.device());
    return OpenOthers(*texts, &parts);
  });
  opened = host->AgreeOk(opened, "opening of cuda_ipc");
  if (!opened.ok()) return retire(opened);
  return std::make_shared<CudaPeerMemory>(std::move(parts), slot_bytes);
}

}  // namespace tessera
