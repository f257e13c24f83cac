#include "comm/shm/map_peers.h"

#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <iterator>
#include <map>
#include <string>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "base/memory/memfd.h"
#include "base/status.h"
#include "comm/connect/keyed_hash.h"
#include "comm/shm/arena.h"
#include "comm/shm/descriptors.h"
#include "comm/shm/exchange.h"
#include "torch/csrc/distributed/c10d/Store.hpp"

// Why it is so. That two ranks are on one host cannot be asked for: containers
// share names and hide hosts. So each rank tries what it is needed for, and the
// two random words show that what it mapped is that rank's memory and not what
// another process of the same name offers. A rank that cannot map a peer must
// not just return: the others would wait for it in the first collective. So all
// tell all how it went (`verdict`), and every rank reads every verdict before
// it returns, even after a failure. That wait has a second use: the words stand
// where staging begins, and nobody may stage before all have looked.
//
// Why groups share the heaps: each is as long as the machine's memory. 64 ranks
// of a machine of 1.5 TiB would fill 96 of the 128 TiB that a process has with
// the heaps of one group alone; those of a second one would not fit.
namespace tessera::shm {
namespace {

// What goes over the socket, with the two descriptors.
struct Hello {
  uint64_t proof[2];
  int64_t heap_bytes;
};

std::vector<uint8_t> BytesOf(const std::string& text) {
  return std::vector<uint8_t>(text.begin(), text.end());
}

}  // namespace

// The heap of another process, as all groups of this one see it.
class PeerHeap {
 public:
  // `fd` stays the caller's. Unavailable.
  static absl::StatusOr<std::shared_ptr<const PeerHeap>> Map(int fd,
                                                             int64_t bytes);
  ~PeerHeap() { munmap(data_, static_cast<size_t>(bytes_)); }
  PeerHeap(const PeerHeap&) = delete;
  PeerHeap& operator=(const PeerHeap&) = delete;

  const char* data() const { return data_; }

 private:
  // A file: no other has these while it is mapped.
  using Key = std::pair<dev_t, ino_t>;

  PeerHeap(char* data, int64_t bytes) : data_(data), bytes_(bytes) {}

  char* const data_;
  const int64_t bytes_;
};

absl::StatusOr<std::shared_ptr<const PeerHeap>> PeerHeap::Map(int fd,
                                                              int64_t bytes) {
  static auto* const mutex = new absl::Mutex;
  static auto* const mapped = new std::map<Key, std::weak_ptr<const PeerHeap>>;
  struct stat info;
  if (fstat(fd, &info) != 0) {
    return absl::UnavailableError(
        absl::StrCat("fstat: ", std::strerror(errno)));
  }
  absl::MutexLock lock(mutex);
  for (auto it = mapped->begin(); it != mapped->end();) {
    it = it->second.expired() ? mapped->erase(it) : std::next(it);
  }
  std::weak_ptr<const PeerHeap>& known = (*mapped)[{info.st_dev, info.st_ino}];
  std::shared_ptr<const PeerHeap> heap = known.lock();
  if (heap != nullptr && heap->bytes_ == bytes) return heap;
  TESSERA_ASSIGN_OR_RETURN(char* const data,
                           MapMemfd(fd, bytes, /*writable=*/false));
  heap.reset(new PeerHeap(data, bytes));
  known = heap;
  return heap;
}

HostMemory::HostMemory() = default;
HostMemory::~HostMemory() {
  for (const Mapping& mapping : mappings_) munmap(mapping.data, mapping.bytes);
}

class PeerMapper {
 public:
  PeerMapper(c10d::Store& store, int rank, int world_size,
             absl::Duration timeout, std::vector<int> names)
      : store_(store),
        rank_(rank),
        world_size_(world_size),
        timeout_(timeout),
        names_(std::move(names)),
        memory_(new HostMemory) {}
  ~PeerMapper();

  absl::StatusOr<std::unique_ptr<HostMemory>> Run();

 private:
  absl::Status Offer();
  absl::Status Take(int peer);
  absl::StatusOr<char*> MapHead(int fd);
  std::string Read(const std::string& key);
  std::string NameOf(int peer) const {
    return absl::StrCat("rank ", names_.empty() ? peer : names_[peer]);
  }

  c10d::Store& store_;
  const int rank_;
  const int world_size_;
  const absl::Duration timeout_;
  const std::vector<int> names_;
  std::unique_ptr<HostMemory> memory_;
  int head_fd_ = -1;
  Hello hello_{};
  std::unique_ptr<DescriptorOffer> offer_;
};

PeerMapper::~PeerMapper() {
  offer_ = nullptr;
  if (head_fd_ >= 0) close(head_fd_);
}

absl::StatusOr<char*> PeerMapper::MapHead(int fd) {
  TESSERA_ASSIGN_OR_RETURN(char* const data,
                           MapMemfd(fd, kHeadBytes, /*writable=*/true));
  memory_->mappings_.push_back({data, kHeadBytes});
  return data;
}

std::string PeerMapper::Read(const std::string& key) {
  store_.wait({key}, absl::ToChronoMilliseconds(timeout_));
  const std::vector<uint8_t> bytes = store_.get(key);
  return std::string(bytes.begin(), bytes.end());
}

// Makes this rank's memory, and listens.
absl::Status PeerMapper::Offer() {
  TESSERA_ASSIGN_OR_RETURN(Arena* const arena, Arena::Get());
  TESSERA_ASSIGN_OR_RETURN(head_fd_, MakeMemfd("tessera-head", kHeadBytes));
  TESSERA_ASSIGN_OR_RETURN(char* const head, MapHead(head_fd_));
  memory_->members_[rank_] = {head, arena->data()};
  memory_->heap_bytes_ = arena->bytes();

  const std::string proof = RandomBytes(sizeof(hello_.proof));
  std::memcpy(hello_.proof, proof.data(), proof.size());
  hello_.heap_bytes = arena->bytes();
  // Stands where staging begins, until the first collective.
  std::memcpy(head + kControlBytes, hello_.proof, sizeof(hello_.proof));

  TESSERA_ASSIGN_OR_RETURN(
      offer_,
      DescriptorOffer::Start(
          {head_fd_, arena->fd()},
          std::string(reinterpret_cast<const char*>(&hello_), sizeof(hello_)),
          world_size_));
  return absl::OkStatus();
}

absl::Status PeerMapper::Take(int peer) {
  const std::string name = Read(absl::StrCat("name/", peer));
  if (name.empty()) return absl::OkStatus();  // it has failed, and will say why
  std::string bytes(sizeof(Hello), 0);
  std::vector<int> descriptors(2);
  TESSERA_RETURN_IF_ERROR(
      TakeDescriptors(name, timeout_, &bytes, &descriptors));
  const absl::Cleanup close_both = [&descriptors] {
    for (int descriptor : descriptors) close(descriptor);
  };
  Hello hello;
  std::memcpy(&hello, bytes.data(), sizeof(hello));
  if (hello.heap_bytes != hello_.heap_bytes) {
    return absl::UnavailableError("it sees another size of memory");
  }
  TESSERA_ASSIGN_OR_RETURN(char* const head, MapHead(descriptors[0]));
  TESSERA_ASSIGN_OR_RETURN(std::shared_ptr<const PeerHeap> heap,
                           PeerHeap::Map(descriptors[1], hello.heap_bytes));
  if (std::memcmp(head + kControlBytes, hello.proof, sizeof(hello.proof)) !=
      0) {
    return absl::UnavailableError("its memory is not what it says");
  }
  memory_->members_[peer] = {head, heap->data()};
  memory_->heaps_.push_back(std::move(heap));
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<HostMemory>> PeerMapper::Run() {
  memory_->members_.resize(world_size_);
  absl::Status mine = Offer();
  store_.set(absl::StrCat("name/", rank_),
             BytesOf(mine.ok() ? offer_->name() : ""));
  for (int peer = 0; peer < world_size_ && mine.ok(); ++peer) {
    if (peer == rank_) continue;
    mine = Annotate(Take(peer), NameOf(peer));
  }
  store_.set(absl::StrCat("verdict/", rank_),
             BytesOf(mine.ok() ? "" : std::string(mine.message())));
  absl::Status all;
  for (int peer = 0; peer < world_size_; ++peer) {
    const std::string verdict = Read(absl::StrCat("verdict/", peer));
    if (verdict.empty() || !all.ok()) continue;
    all = absl::UnavailableError(absl::StrCat(
        "the ranks cannot share memory: [", NameOf(peer), "] ", verdict));
  }
  // Nobody writes where the proofs stand before all have looked.
  TESSERA_RETURN_IF_ERROR(all);
  return std::move(memory_);
}

absl::StatusOr<std::unique_ptr<HostMemory>> MapPeers(c10d::Store& store,
                                                     int rank, int world_size,
                                                     absl::Duration timeout,
                                                     std::vector<int> names) {
  return PeerMapper(store, rank, world_size, timeout, std::move(names)).Run();
}

}  // namespace tessera::shm
