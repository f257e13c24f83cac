// Computes gradient norms over all ranks, and the factor of clipping.
//
//   (sum of |x|^p)^(1/p)   over the elements of all parameters, each once
//
// The bits depend on the gradients alone, not on sharding, world size, threads
// or order: elements are summed in blocks of 64 on a grid that starts with each
// parameter's storage (optim/norm/block_powers.h, which also says for which p
// the kind of processor matters), and shards are cut on that grid; the block
// sums are added exactly (optim/norm/exact_sum.h), and their sum is rounded
// once.
#ifndef OPTIM_NORM_GRAD_NORM_H_
#define OPTIM_NORM_GRAD_NORM_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "optim/norm/exact_sum.h"

namespace tessera {

class Communicator;  // comm/communicator.h
struct CommTag;

// Each rank adds what it owns, then all exchange their sums:
//
//   std::vector<NormSum> sums(1, NormSum(2));
//   for (segments of this rank) sums[0].Add(gradient, first);
//   sums[0].Finish();
//   TESSERA_RETURN_IF_ERROR(SumOverRanks(group_size, tag, comm, &sums));
//   const double norm = sums[0].Norm();
//
// An element that is infinite makes the norm infinite, a NaN makes it NaN, even
// beside infinities. So do (infinite) powers beyond double's range: float64
// elements above 1e154 for p = 2.
// Threads: const methods may run concurrently; the others need outside order.
class NormSum {
 public:
  // REQUIRES: p > 0; infinity is the norm max |x|.
  explicit NormSum(double p);

  // Adds a parameter's elements [first, first + n), counted from its storage's
  // element 0. No two calls on any rank may cover parts of one block of the
  // grid: 64 elements, 32 if complex. With p = 2 complex numbers may as well
  // come as pairs of real ones: the bits are the same. LOCAL. Memory of 3 MB;
  // on devices some 130 MB, and 8 bytes a block until Finish. Throws c10::Error
  // as libtorch does, see CatchTorch. REQUIRES: `segment` is contiguous, [n],
  // of float16, bfloat16, float32, float64, complex64 or complex128; first >=
  // 0. ASYNC on devices: on the current stream.
  void Add(const at::Tensor& segment, int64_t first);
  // Adds a sum of powers of elements, of at most one block, or one that is more
  // exact.
  void AddBlock(double block);
  // Ends this rank's additions; waits once for a device.
  void Finish();

  // Returns this sum as text: equal sums have equal texts. Below 700 bytes.
  std::string Serialize() const;

  // Adds a sum that another Serialize gave. On error this sum stays as it is:
  // DataLoss if the text is damaged, InvalidArgument if it is of another p.
  absl::Status Merge(absl::string_view text);

  // Returns the norm of all that was added, 0 if nothing was.
  double Norm() const;
  double p() const { return p_; }

 private:
  double p_;
  std::vector<at::Tensor> on_device_;  // block sums that Finish will fetch
  // The greatest block if p is infinity; else 0, or the infinity or NaN that
  // was among the block sums.
  double extreme_ = 0;
  ExactSum sum_;  // of the other block sums
};

// Which ranks of a job have all elements of a model together: `copies` times,
// and within a copy so many neighbours lie beside each other. With stages of a
// pipeline, which are outermost, a copy is a run of neighbours of each stage.
struct RankCopies {
  int64_t copies = 1, neighbours = 1;
  int64_t CopyOf(int64_t rank) const { return rank / neighbours % copies; }
};

// Makes each of `sums` the sum over the ranks of the first copy. The others are
// its replicas and must have the same sums: ReplicasDiffer. All ranks have as
// many sums, each of the same p as the others'; else DataLoss and Merge's
// errors. REQUIRES: NormSum::Finish of all. COLLECTIVE: one small exchange.
absl::Status SumOverRanks(const RankCopies& copies, const CommTag& tag,
                          Communicator* comm, std::vector<NormSum>* sums);
// Returns the error that the gradients of ranks [first, first + group_size)
// differ from those of the first `group_size`, whose replicas they are.
absl::Status ReplicasDiffer(int64_t first, int64_t group_size);

// Returns the factor that clips gradients to `max_norm` (DeepSpeed's
// gradient_clipping, where 0 means no clipping, as does any max_norm <= 0):
//   max_norm / (norm + 1e-6)   if norm + 1e-6 > max_norm, else 1
// DeepSpeed and libtorch add the 1e-6 too, which keeps the clipped norm below
// max_norm: a clipped gradient's is max_norm * norm / (norm + 1e-6). Both norms
// are those of unscaled gradients. 0 if `norm` is infinite, 1 if it is NaN.
double ClipCoefficient(double norm, double max_norm);

}  // namespace tessera
#endif  // OPTIM_NORM_GRAD_NORM_H_
