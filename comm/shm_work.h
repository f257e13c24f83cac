// ShmWork: the end of one operation of the shm backend, as c10d wants it.
#ifndef COMM_SHM_WORK_H_
#define COMM_SHM_WORK_H_

#include <atomic>
#include <cstdint>
#include <exception>
#include <vector>

#include "ATen/core/Tensor.h"
#include "ATen/core/ivalue.h"
#include "absl/status/status.h"
#include "c10/util/intrusive_ptr.h"
#include "torch/csrc/distributed/c10d/Work.hpp"

namespace tessera {

class ShmWork : public c10d::Work {
 public:
  ShmWork(int rank, c10d::OpType type, uint64_t sequence,
          std::vector<at::Tensor> outputs);

  // Once. `source` is the rank that sent, for receives.
  void End(const absl::Status& status, int source = -1);
  void EndWith(const std::exception_ptr& error);  // null: well

  std::vector<at::Tensor> result() override { return outputs_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    return future_;
  }
  int sourceRank() const override { return source_; }
  uint64_t getSequencenumber() const override { return sequence_; }

 private:
  const uint64_t sequence_;
  const std::vector<at::Tensor> outputs_;
  const c10::intrusive_ptr<c10::ivalue::Future> future_;
  std::atomic<int> source_{-1};
};

// Ends when all of `works` have, with the first one's error.
c10::intrusive_ptr<ShmWork> EndOfAll(
    int rank, std::vector<c10::intrusive_ptr<ShmWork>> works);

}  // namespace tessera
#endif  // COMM_SHM_WORK_H_
