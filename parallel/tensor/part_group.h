// PartGroup: the ranks that have parts of the same tensors, and what they
// exchange, through autograd.
#ifndef PARALLEL_TENSOR_PART_GROUP_H_
#define PARALLEL_TENSOR_PART_GROUP_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "ATen/core/Tensor.h"
#include "comm/communicator.h"

namespace torch::autograd {
struct Node;
}

namespace tessera {

// Returns the strides, without gaps, of a whole of those sizes that lies in
// memory as its parts do: random numbers are drawn in that order.
std::vector<int64_t> StridesLike(const at::Tensor& part, at::IntArrayRef sizes);

// While it lives, collectives of this thread's PartGroups are for the operator
// `name`, which their tags say: ranks that are in different operators get an
// error that names both.
class CollectivesOf {
 public:
  explicit CollectivesOf(const std::string& name);
  ~CollectivesOf();
  CollectivesOf(const CollectivesOf&) = delete;
  CollectivesOf& operator=(const CollectivesOf&) = delete;
  // "": none.
  static const std::string& Current();

 private:
  const std::string* const before_;
};

class PartGroup : public std::enable_shared_from_this<PartGroup> {
 public:
  explicit PartGroup(std::shared_ptr<Communicator> ranks)
      : ranks_(std::move(ranks)) {}

  int rank() const { return ranks_->rank(); }
  int size() const { return ranks_->world_size(); }
  int64_t collectives() const { return collectives_; }

  // Called with the name of each operator that has no rule for the parts that
  // it gets, so they are gathered; if it is not set, the log says so once for
  // each operator. Set it before the group is used.
  using OnGathered = std::function<void(const std::string& op)>;
  void set_on_gathered(OnGathered on_gathered) {
    on_gathered_ = std::move(on_gathered);
  }
  const OnGathered& on_gathered() const { return on_gathered_; }

  // ---- through autograd; errors are thrown as StatusException ----

  // Returns the sum of all ranks' tensors, added in rank order. Its gradient is
  // that of each. COLLECTIVE.
  at::Tensor Sum(const at::Tensor& addend);
  // Returns the tensor; in backward the sum of all ranks' gradients. Once for a
  // tensor that is used several times in a row. COLLECTIVE in backward.
  at::Tensor SumInBackward(const at::Tensor& tensor);
  // Returns the tensor; in backward AddendOf its gradient. LOCAL.
  at::Tensor CountOnce(const at::Tensor& tensor);
  // Returns an addend of the sum over the ranks that a tensor is, equal on all:
  // the tensor on the first, zeros elsewhere. LOCAL.
  at::Tensor AddendOf(const at::Tensor& tensor);
  // Returns all ranks' parts along `dim`. COLLECTIVE.
  at::Tensor Gather(const at::Tensor& part, int64_t dim);
  // Returns this rank's part along `dim`; in backward the parts of all.
  // COLLECTIVE in backward. InvalidArgument if the ranks do not divide it.
  at::Tensor Slice(const at::Tensor& whole, int64_t dim);
  // Returns this rank's part along `to` of what is divided along `from`; in
  // backward the other way. COLLECTIVE. InvalidArgument as Slice.
  at::Tensor Exchange(const at::Tensor& part, int64_t from, int64_t to);

  // ---- without autograd ----

  // Results are memory that no tape of operators (sharding/recompute) sees
  // filled, so that it is kept and not computed again without the other ranks.
  at::Tensor SumOf(const at::Tensor& addend);
  at::Tensor GatherOf(const at::Tensor& part, int64_t dim);
  at::Tensor SliceOf(const at::Tensor& whole, int64_t dim) const;
  at::Tensor ExchangeOf(const at::Tensor& part, int64_t from, int64_t to);

 private:
  void CheckDivides(const at::Tensor& whole, int64_t dim) const;

  const std::shared_ptr<Communicator> ranks_;
  std::atomic<int64_t> collectives_ = 0;  // backward has threads of its own
  OnGathered on_gathered_;

  std::mutex mutex_;
  std::weak_ptr<torch::autograd::Node> last_;  // of SumInBackward
};

}  // namespace tessera
#endif  // PARALLEL_TENSOR_PART_GROUP_H_
