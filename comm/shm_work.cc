#include "comm/shm_work.h"

#include <atomic>
#include <exception>
#include <memory>
#include <string>
#include <utility>

#include "ATen/core/jit_type.h"
#include "c10/util/Exception.h"

namespace tessera {
namespace {

std::exception_ptr AsException(const absl::Status& status) {
  try {
    TORCH_CHECK_WITH(DistBackendError, false, std::string(status.message()));
  } catch (...) {
    return std::current_exception();
  }
}

}  // namespace

ShmWork::ShmWork(int rank, c10d::OpType type, uint64_t sequence,
                 std::vector<at::Tensor> outputs)
    : Work(rank, type),
      sequence_(sequence),
      outputs_(std::move(outputs)),
      future_(c10::make_intrusive<c10::ivalue::Future>(
          c10::ListType::create(c10::TensorType::get()))) {}

void ShmWork::End(const absl::Status& status, int source) {
  source_ = source;
  if (status.ok()) {
    finish();
    future_->markCompleted(at::IValue(outputs_));
  } else {
    const std::exception_ptr error = AsException(status);
    finish(error);
    future_->setError(error);
  }
}

c10::intrusive_ptr<ShmWork> EndOfAll(
    int rank, std::vector<c10::intrusive_ptr<ShmWork>> works) {
  std::vector<at::Tensor> outputs;
  for (const auto& work : works) {
    for (const at::Tensor& t : work->result()) outputs.push_back(t);
  }
  auto all = c10::make_intrusive<ShmWork>(rank, c10d::OpType::COALESCED, 0,
                                          std::move(outputs));
  struct Count {
    std::atomic<size_t> open;
    std::atomic<bool> failed{false};
  };
  auto count = std::make_shared<Count>();
  count->open = works.size() + 1;
  auto one_less = [all, count] {
    if (--count->open == 0 && !count->failed) all->End(absl::OkStatus());
  };
  for (const auto& work : works) {
    work->getFuture()->addCallback(
        [all, count, one_less](c10::ivalue::Future& future) {
          if (future.hasError() && !count->failed.exchange(true)) {
            all->End(absl::UnavailableError(future.tryRetrieveErrorMessage()));
          }
          one_less();
        });
  }
  one_less();
  return all;
}

}  // namespace tessera
