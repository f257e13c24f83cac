// What the tests of operators that write share: the operators of
// operator_writes_test.cc by name, and an engine.
#ifndef TESTS_ENGINE_OPERATOR_WRITES_TEST_UTIL_H_
#define TESTS_ENGINE_OPERATOR_WRITES_TEST_UTIL_H_

#include <torch/torch.h>

#include <memory>
#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "comm/communicator.h"
#include "engine/engine.h"
#include "tests/support/rank_pool.h"
#include "tests/support/training.h"

namespace tessera {

template <typename Signature>
auto Find(const std::string& name) {
  return c10::Dispatcher::singleton()
      .findSchemaOrThrow(absl::StrCat("operator_writes_test::", name).c_str(),
                         "")
      .typed<Signature>();
}

inline bool Shares() { return DefaultBackend() == "shm"; }

// Makes an engine at stage 3 where no unit stays whole without a reason.
inline absl::StatusOr<std::unique_ptr<Engine>> Create(
    std::shared_ptr<torch::nn::Module> model,
    std::shared_ptr<Communicator> comm, int stage, bool check_writes = false) {
  TrainingSpec spec;
  spec.stage = stage;
  spec.max_live_parameters = 0;
  if (stage == 3) (Shares() ? spec.shared : spec.served) = "on";
  proto::Config config = ConfigOf(spec);
  config.mutable_sharding()->set_check_writes(check_writes);
  EngineOptions options;
  options.communicator = std::move(comm);
  return Engine::Create(std::move(model), config, options);
}

}  // namespace tessera
#endif  // TESTS_ENGINE_OPERATOR_WRITES_TEST_UTIL_H_
