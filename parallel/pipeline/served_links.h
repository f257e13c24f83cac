// ServedLinks: StageLinks over the server by which ranks read each other's
// memory (comm/shard_server.h). The ranks of its group are the stages.
#ifndef PARALLEL_PIPELINE_SERVED_LINKS_H_
#define PARALLEL_PIPELINE_SERVED_LINKS_H_

#include <memory>
#include <string>
#include <utility>

#include "comm/shard_server.h"
#include "parallel/pipeline/stage_links.h"

namespace tessera {

class ServedLinks final : public StageLinks {
 public:
  explicit ServedLinks(std::unique_ptr<ShardServer> server)
      : server_(std::move(server)) {}

  void Post(int to, int64_t key, at::Tensor message) override {
    server_->Post(to, key, std::move(message));
  }
  absl::Status Take(int from, int64_t key, const at::Tensor& message,
                    const std::string& what) override {
    return server_->Take(from, key, message, CommTag{what}).Wait();
  }

 private:
  const std::unique_ptr<ShardServer> server_;
};

}  // namespace tessera
#endif  // PARALLEL_PIPELINE_SERVED_LINKS_H_
