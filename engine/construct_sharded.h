// ConstructSharded: builds a module that is larger than a rank's memory.
//
//   auto make = [&] { return Gpt(options); };
//   auto gpt = tessera::ConstructSharded(256 << 20, make);
//   auto engine = tessera::Engine::Create(*gpt, "zero3.json");
//
// The constructor runs as it is, on the CPU, on every rank. Of the tensors that
// it makes only as many are whole as the budget allows; what was used longest
// ago goes to the shards of all ranks and comes back when an operator asks for
// it, except what an operator overwrites (init::normal_ and the like). Values
// and the generator's state are those of plain construction, whatever the
// constructor does: torch::tensor, item(), a second pass over the weights.
//
// Parameters of at least 512 bytes are then sharded, and so are views of them,
// until Engine::Create takes them over, unit by unit, or makes them plain where
// they are ignored. Operators may use them before: COLLECTIVE, a gather; writes
// must be the same on all ranks (InvalidArgument at the next gather). Other
// buffers and tensors are whole. Peak: this rank's shard, and the budget.
//
// An accessor or raw pointer is good until the next operators: while some run,
// or for a tensor of long ago, hold a tessera::Use on it. Without one the
// access throws, or ends the program, with a message that says so; torch::save
// is such an access. Tensors that other threads or CUDA make are not sharded.
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
  // The group over which to shard, which the engine must have too; the world's
  // (comm/world/world.h) if null. With one rank construction is plain.
  std::shared_ptr<Communicator> communicator;
};

namespace construct_internal {

absl::Status Run(int64_t budget_bytes, const ConstructOptions& options,
                 const std::function<const torch::nn::Module*()>& make);

// Of a std::shared_ptr, of a holder.
template <typename M>
const torch::nn::Module* ModuleOf(const M& made) {
  if constexpr (std::is_convertible_v<M, std::shared_ptr<torch::nn::Module>>) {
    return made.get();
  } else {
    return made.ptr().get();
  }
}

}  // namespace construct_internal

// `make` returns a std::shared_ptr to a module, or a holder (TORCH_MODULE).
// `budget_bytes` is of whole tensors at a time; at least twice what an operator
// of the constructor uses together, which is whole in any case. COLLECTIVE.
//
// Errors, on all ranks: what `make` throws (on one rank alone: the group is of
// no use after that, as others may wait for it in a gather); InvalidArgument if
// ranks construct different values (they must have one seed), for a budget
// below 1, for null; ResourceExhausted; FailedPrecondition within another
// ConstructSharded, or without a world.
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
