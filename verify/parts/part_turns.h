// PartTurns: computes the parts of a model that is divided by tensors
// (parallel/tensor/placed.h) in one process, one after the other, as plain
// training computes ranks: the sums of parts are added in their order.
//
//   part 0   forward .. sum            sum .. backward .. sum
//   part 1               forward .. sum                       sum .. backward
//            only one runs at a time ---->
//
// A part's turn ends where it needs what the others have. Each part draws the
// numbers of the default generator that it would draw alone.
//
// The parts are computed by the rules of parallel/tensor, which this shares
// with what it is compared with; tests/parallel/tensor_bits_test.cc compares
// them with plain tensors.
//
// Threads: a thread for each part, of which one at a time runs.
#ifndef VERIFY_PARTS_PART_TURNS_H_
#define VERIFY_PARTS_PART_TURNS_H_

#include <condition_variable>
#include <cstddef>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "ATen/core/Generator.h"
#include "ATen/core/Tensor.h"
#include "comm/comm_call.h"
#include "parallel/tensor/part_group.h"

namespace tessera {

class PartTurns {
 public:
  // `generator`: the default one of the parts' device.
  PartTurns(int parts, at::Generator generator);
  PartTurns(const PartTurns&) = delete;
  PartTurns& operator=(const PartTurns&) = delete;

  // The group of which `part` is a rank, for modules that it computes with.
  const std::shared_ptr<PartGroup>& group(int part) const {
    return groups_[static_cast<size_t>(part)];
  }
  // Calls run(part) for each part, and returns when all are done; one part runs
  // on the calling thread. All begin with the generator's state, and the state
  // afterwards is the first's. Throws what the first of them throws, and
  // c10::Error if the parts do not exchange the same.
  void Run(const std::function<void(int part)>& run);

 private:
  class Group;

  absl::Status Exchange(int part, const CommCall& call);
  void Combine();
  void SumUp();
  void HandOut();
  void AwaitTurn(std::unique_lock<std::mutex>* lock, int part);
  void PassTurn(int part);
  void RunPart(int part, const std::function<void(int part)>& run);

  const int parts_;
  at::Generator generator_;
  std::vector<std::shared_ptr<PartGroup>> groups_;

  std::mutex mutex_;
  std::condition_variable turned_;
  int turn_ = 0;
  std::vector<bool> ended_;             // by part, as the following
  std::vector<at::Tensor> states_;      // of the generator
  std::vector<const CommCall*> calls_;  // that wait for the others'
  std::vector<std::exception_ptr> errors_;
  absl::Status failed_;  // of the exchanges
};

}  // namespace tessera
#endif  // VERIFY_PARTS_PART_TURNS_H_
