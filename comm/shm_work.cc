#include "comm/shm_work.h"

#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "ATen/core/jit_type.h"
#include "base/log.h"
#include "base/torch_guard.h"
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
  EndWith(status.ok() ? nullptr : AsException(status));
}

void ShmWork::EndWith(const std::exception_ptr& error) {
  // The future first, as c10d's own backends: who has waited sees it complete.
  // Its callbacks are the user's.
  const absl::Status called = CatchTorch("a callback of a shm work", [&] {
    if (error == nullptr) {
      future_->markCompleted(at::IValue(outputs_));
    } else {
      future_->setError(error);
    }
  });
  if (!called.ok()) TESSERA_LOG(WARNING) << called.message();
  finish(error);
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
    std::mutex mutex;
    size_t open;
    std::exception_ptr first_error;
  };
  auto count = std::make_shared<Count>();
  count->open = works.size() + 1;
  auto one_less = [all, count](const std::exception_ptr& error) {
    {
      const std::lock_guard<std::mutex> lock(count->mutex);
      if (count->first_error == nullptr) count->first_error = error;
      if (--count->open > 0) return;
    }
    all->EndWith(count->first_error);
  };
  for (const auto& work : works) {
    work->getFuture()->addCallback([one_less](c10::ivalue::Future& future) {
      one_less(future.hasError() ? future.exception_ptr() : nullptr);
    });
  }
  one_less(nullptr);
  return all;
}

}  // namespace tessera
