// ConstructSharded: builds a module that is larger than a rank's memory.
//
//   auto make = [&] { return Gpt(options); };
//   auto gpt = tessera::ConstructSharded(256 << 20, make);
//   auto engine = tessera::Engine::Create(*gpt, "zero3.json");
//
// The constructor runs as it is, on the CPU, on every rank. Only as many of its
// tensors are whole as the budget allows: the least recently used ones are
// sharded over all ranks and gathered when an operator uses them, unless it
// overwrites them (init::normal_ and the like). Values and the generator's
// state are those of plain construction, whatever the constructor does:
// torch::tensor, item(), a second pass over the weights.
//
// Afterwards parameters of at least 512 bytes, and views of them, are sharded
// until Engine::Create takes them over, unit by unit, or makes them plain where
// they are ignored. Operators may use them before that: each use is a gather,
// COLLECTIVE; writes must be identical on all ranks (InvalidArgument at the
// next gather). Other tensors and buffers are whole. Peak memory: this rank's
// shard and the budget.
//
// An accessor or raw pointer is valid only until the next operator: to keep it
// valid across operators, or for a tensor that was not used recently, hold a
// tessera::Use on the tensor. Otherwise the access throws, or ends the program,
// with a message that says so; torch::save is such an access. Tensors made by
// other threads or on CUDA are not sharded.
#ifndef ENGINE_CONSTRUCT_SHARDED_H_
#define ENGINE_CONSTRUCT_SHARDED_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <type_traits>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "comm/communicator.h"

namespace torch::nn {
class Module;
}

namespace tessera {

struct ConstructOptions {
  // The group over which to shard, which the engine must use too; the world's
  // (comm/world/world.h) if null. With one rank, construction is plain.
  std::shared_ptr<Communicator> communicator;
};

namespace construct_internal {

absl::Status Run(int64_t budget_bytes, const ConstructOptions& options,
                 const std::function<const torch::nn::Module*()>& make);

// Returns the module of a std::shared_ptr or of a holder.
template <typename M>
const torch::nn::Module* ModuleOf(const M& made) {
  if constexpr (std::is_convertible_v<M, std::shared_ptr<torch::nn::Module>>) {
    return made.get();
  } else {
    return made.ptr().get();
  }
}

}  // namespace construct_internal

// Builds the module that `make` returns, as a std::shared_ptr or a holder
// (TORCH_MODULE). `budget_bytes` bounds the whole tensors at a time; it should
// be at least twice what one operator of the constructor uses, which is whole
// in any case. COLLECTIVE.
//
// Errors, on all ranks: what `make` throws (if it throws on one rank only, the
// group is unusable afterwards, as others may wait for it in a gather);
// InvalidArgument if ranks construct different values (they must use the same
// seed), for a budget below 1, for null; ResourceExhausted; FailedPrecondition
// within another ConstructSharded, or without a world.
template <typename Make>
absl::StatusOr<std::invoke_result_t<Make&>> ConstructSharded(
    int64_t budget_bytes, Make&& make, const ConstructOptions& options = {}) {
  std::optional<std::invoke_result_t<Make&>> made;
  const absl::Status status = construct_internal::Run(
      budget_bytes, options, [&]() -> const torch::nn::Module* {
        made.emplace(make());
        return construct_internal::ModuleOf(*made);
      });
  if (!status.ok()) return status;
  return *std::move(made);
}

}  // namespace tessera
#endif  // ENGINE_CONSTRUCT_SHARDED_H_
