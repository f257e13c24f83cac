// BufferSync: makes the buffers of a module (a batch norm's running statistics)
// the same on all ranks, where the configuration asks for it.
#ifndef ENGINE_BUILD_BUFFER_SYNC_H_
#define ENGINE_BUILD_BUFFER_SYNC_H_

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "comm/communicator.h"

namespace torch::nn {
class Module;
}

namespace tessera {

class BufferSync {
 public:
  enum class Values {
    kRank0,
    // Floating and complex buffers become their mean over ranks: added up in
    // rank order, 16-bit ones in float32, and divided by the world size. Others
    // become rank 0's.
    kMean,
  };

  // Returns InvalidArgument with the first buffer whose name, sizes or dtype
  // differs between ranks. `module` and `comm` outlive this. COLLECTIVE.
  static absl::StatusOr<std::unique_ptr<BufferSync>> Create(
      const torch::nn::Module* module, Values values, at::Device device,
      Communicator* comm);

  // Makes the buffers identical on all ranks: one collective for each dtype, in
  // memory of `device`. FailedPrecondition if some rank has other buffers than
  // at Create; nothing has changed then. COLLECTIVE.
  absl::Status Sync();

 private:
  using Named = std::pair<std::string, at::Tensor>;
  BufferSync(const torch::nn::Module* module, Values values, at::Device device,
             Communicator* comm)
      : module_(module), values_(values), device_(device), comm_(comm) {}
  std::vector<Named> Buffers() const;
  absl::Status CheckKnown(const std::vector<Named>& buffers) const;
  absl::Status SyncGroup(const std::vector<at::Tensor>& buffers);

  const torch::nn::Module* const module_;
  const Values values_;
  const at::Device device_;
  Communicator* const comm_;
  std::vector<std::string> known_;  // a line for each buffer at Create
};

}  // namespace tessera
#endif  // ENGINE_BUILD_BUFFER_SYNC_H_
