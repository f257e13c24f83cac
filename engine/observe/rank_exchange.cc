#include "engine/observe/rank_exchange.h"

#include <cstddef>
#include <utility>

#include "ATen/ops/empty.h"
#include "absl/types/span.h"
#include "base/torch/torch_scope.h"
#include "base/torch_guard.h"

namespace tessera {

// What cannot be read (a loss without memory) is none: the step's own business
// is not held up.
void LossSum::Add(const at::Tensor& loss, double times) {
  (void)CatchTorch("loss", [&] {
    TorchScope scope;
    any_ = true;
    if (loss.is_cpu()) {
      host_ += loss.item().toDouble() * times;
      return;
    }
    const at::Tensor one = loss.detach().to(at::kDouble).reshape({}).mul(times);
    on_device_ = on_device_.defined() ? on_device_.add(one) : one;
  });
}

void LossSum::Send() {
  if (on_host()) return;
  const absl::Status sent = CatchTorch("loss", [&] {
    TorchScope scope;
    arriving_ = at::empty(
        {}, on_device_.options().device(at::kCPU).pinned_memory(true));
    arriving_.copy_(on_device_, /*non_blocking=*/true);
    arrived_ = StreamPoint::Now(on_device_.device());
  });
  if (!sent.ok()) arriving_ = at::Tensor();
}

double LossSum::Take() {
  if (on_host()) return host_;
  double sum = RankMetrics::kUnknown;
  (void)CatchTorch("loss", [&] {
    if (!arriving_.defined()) return;
    arrived_.Wait();
    sum = host_ + *arriving_.const_data_ptr<double>();
  });
  return sum;
}

RankExchange::RankExchange(RankMetrics mine, LossSum loss)
    : mine_(mine), loss_(std::move(loss)) {
  loss_.Send();
}

void RankExchange::Start(Communicator* comm) {
  started_ = true;
  mine_.loss_sum = loss_.Take();
  TorchScope scope;
  const int64_t numel = RankMetrics::numel();
  shard_ = at::empty({numel}, at::kDouble);
  whole_ = at::empty({numel * comm->world_size()}, at::kDouble);
  mine_.ToValues(absl::MakeSpan(shard_.mutable_data_ptr<double>(),
                                static_cast<size_t>(numel)));
  future_ = comm->AllGather(shard_, whole_, {"metrics of a step"});
}

std::vector<RankMetrics> RankExchange::Finish(int world_size) {
  if (!started_) mine_.loss_sum = loss_.Take();
  if (!started_ || !future_.Wait().ok()) return {mine_};
  std::vector<RankMetrics> all;
  const auto numel = static_cast<size_t>(RankMetrics::numel());
  const double* const values = whole_.const_data_ptr<double>();
  for (int r = 0; r < world_size; ++r) {
    all.push_back(RankMetrics::FromValues(
        absl::MakeConstSpan(values + static_cast<size_t>(r) * numel, numel)));
  }
  return all;
}

}  // namespace tessera
