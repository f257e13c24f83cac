// Measures what collectives over shared memory cost at least: plain loops over
// the ranks' memory, with a barrier before and after.
#ifndef BENCHMARKS_BARE_COPY_H_
#define BENCHMARKS_BARE_COPY_H_

#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <utility>

#include "ATen/core/Tensor.h"
#include "absl/status/status.h"
#include "base/memory/memory.h"
#include "base/status.h"
#include "comm/shm/collectives.h"
#include "comm/shm/map_peers.h"
#include "comm/shm/team.h"

namespace tessera {

// The tensors of one rank for a backend; `shard` is its own slice of `whole`.
struct Tensors {
  CountedBuffer memory[2];
  at::Tensor whole, shard;
};

// BareCopy is the bare loop. It sums fp32 or fp64; other dtypes are refused.
class BareCopy {
 public:
  BareCopy(std::unique_ptr<shm::HostMemory> memory, int rank)
      : memory_(std::move(memory)),
        team_(rank, memory_->members(), memory_->heap_bytes()),
        collectives_(&team_) {}

  absl::Status Run(const std::string& op, Tensors& t) {
    TESSERA_RETURN_IF_ERROR(collectives_.Barrier("before"));
    const int64_t shard_bytes = static_cast<int64_t>(t.shard.nbytes());
    if (op == "all_gather") {
      for (int i = 0; i < team_.size(); ++i) {
        const int peer = (team_.rank() + i) % team_.size();
        std::memcpy(At(t.whole) + peer * shard_bytes, Of(peer, t.shard),
                    shard_bytes);
      }
    } else {
      TESSERA_RETURN_IF_ERROR(Sum(t, shard_bytes));
      if (op == "all_reduce") {
        std::memcpy(At(t.whole) + team_.rank() * shard_bytes, At(t.shard),
                    shard_bytes);
        TESSERA_RETURN_IF_ERROR(collectives_.Barrier("between"));
        Gather(t, shard_bytes);
      }
    }
    return collectives_.Barrier("after");
  }

 private:
  static char* At(const at::Tensor& t) {
    return static_cast<char*>(t.mutable_data_ptr());
  }
  // Returns the corresponding tensor of another rank: all ranks allocate the
  // same buffers in the same order.
  const char* Of(int peer, const at::Tensor& t) const {
    return team_.heap_of(peer) + (At(t) - team_.heap_of(team_.rank()));
  }
  void Gather(Tensors& t, int64_t bytes) {
    for (int i = 1; i < team_.size(); ++i) {
      const int peer = (team_.rank() + i) % team_.size();
      std::memcpy(At(t.whole) + peer * bytes, Of(peer, t.whole) + peer * bytes,
                  bytes);
    }
  }
  template <typename T>
  void SumOf(Tensors& t) {
    const int64_t numel = t.shard.numel();
    T* const out = reinterpret_cast<T*>(At(t.shard));
    const auto row = [&](int peer) {
      return reinterpret_cast<const T*>(Of(peer, t.whole)) +
             team_.rank() * numel;
    };
    const T* const a = row(0);
    const T* const b = row(1);
    for (int64_t i = 0; i < numel; ++i) out[i] = a[i] + b[i];
    for (int r = 2; r < team_.size(); ++r) {
      const T* const next = row(r);
      for (int64_t i = 0; i < numel; ++i) out[i] += next[i];
    }
  }
  absl::Status Sum(Tensors& t, int64_t bytes) {
    if (t.whole.scalar_type() == at::kFloat) {
      SumOf<float>(t);
    } else if (t.whole.scalar_type() == at::kDouble) {
      SumOf<double>(t);
    } else {
      return absl::UnimplementedError("copy sums fp32 and fp64 only");
    }
    return absl::OkStatus();
  }

  std::unique_ptr<shm::HostMemory> memory_;
  shm::Team team_;
  shm::Collectives collectives_;
};

}  // namespace tessera
#endif  // BENCHMARKS_BARE_COPY_H_
