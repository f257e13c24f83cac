// For tests: the ranks of one host as threads of one process, so that
// ThreadSanitizer sees all of them.
#ifndef COMM_SHM_SHM_TESTING_H_
#define COMM_SHM_SHM_TESTING_H_

#include <sys/mman.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "base/check.h"
#include "comm/shm/collectives.h"
#include "comm/shm/exchange.h"
#include "comm/shm/team.h"

namespace tessera::shm {

inline constexpr int64_t kMemoryBytes = 64 << 20;

// One host's memory, mapped once for all ranks.
class Host {
 public:
  explicit Host(int size) {
    for (int r = 0; r < size; ++r) {
      void* memory = mmap(nullptr, kMemoryBytes, PROT_READ | PROT_WRITE,
                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      TESSERA_CHECK(memory != MAP_FAILED);
      memory_.push_back(static_cast<char*>(memory));
      members_.push_back({memory_[r], memory_[r] + kHeadBytes});
    }
    for (int r = 0; r < size; ++r) {
      teams_.push_back(
          std::make_unique<Team>(r, members_, kMemoryBytes - kHeadBytes));
      ranks_.push_back(std::make_unique<Collectives>(teams_[r].get()));
    }
  }
  ~Host() {
    for (char* memory : memory_) munmap(memory, kMemoryBytes);
  }

  int size() const { return static_cast<int>(teams_.size()); }
  Team& team(int rank) { return *teams_[rank]; }
  Collectives& rank(int rank) { return *ranks_[rank]; }
  // Returns the begin of a rank's heap.
  char* heap(int rank) { return memory_[rank] + kHeadBytes; }

  std::vector<absl::Status> Run(
      const std::function<absl::Status(int, Collectives&)>& body) {
    std::vector<absl::Status> results(size());
    std::vector<std::thread> threads;
    for (int r = 0; r < size(); ++r) {
      threads.emplace_back([&, r] { results[r] = body(r, *ranks_[r]); });
    }
    for (std::thread& thread : threads) thread.join();
    return results;
  }

 private:
  std::vector<char*> memory_;
  std::vector<Member> members_;
  std::vector<std::unique_ptr<Team>> teams_;
  std::vector<std::unique_ptr<Collectives>> ranks_;
};

inline Host& HostOf(int size) {
  static std::vector<std::unique_ptr<Host>>* const hosts =
      new std::vector<std::unique_ptr<Host>>(9);
  if ((*hosts)[size] == nullptr) (*hosts)[size] = std::make_unique<Host>(size);
  return *(*hosts)[size];
}

}  // namespace tessera::shm
#endif  // COMM_SHM_SHM_TESTING_H_
