// Describes what an engine has of a model as lines that tests compare.
#ifndef TESTS_CHECKPOINT_CHECKPOINT_STATE_H_
#define TESTS_CHECKPOINT_CHECKPOINT_STATE_H_

#include <torch/torch.h>

#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "base/crc32c.h"
#include "base/status.h"
#include "checkpoint/checkpoint.h"
#include "engine/engine.h"
#include "tests/models/models.h"

namespace tessera {

// Formats a state as tools/read_checkpoint.py prints it.
inline std::string LineOf(const std::string& name, const char* state,
                          const at::Tensor& tensor) {
  const at::Tensor here = tensor.contiguous();
  const absl::string_view bytes(static_cast<const char*>(here.const_data_ptr()),
                                here.nbytes());
  return absl::StrCat(name, " ", state, " ",
                      CheckpointDtype(tensor.scalar_type()), " [",
                      absl::StrJoin(tensor.sizes(), ", "), "] ",
                      absl::Hex(Crc32c(bytes), absl::kZeroPad8));
}

// Returns a line for each master and optimizer state, after the number of the
// step. COLLECTIVE.
inline absl::StatusOr<std::string> StateOf(Engine& engine,
                                           const TestModel& model) {
  std::string lines = absl::StrCat("step ", engine.step());
  for (const auto& item : model.named_parameters()) {
    const std::string& name = item.key();
    TESSERA_ASSIGN_OR_RETURN(const at::Tensor value, engine.Master(name));
    TESSERA_ASSIGN_OR_RETURN(const at::Tensor exp_avg,
                             engine.OptimizerStateOf(name, "exp_avg"));
    TESSERA_ASSIGN_OR_RETURN(const at::Tensor exp_avg_sq,
                             engine.OptimizerStateOf(name, "exp_avg_sq"));
    absl::StrAppend(&lines, "\n", LineOf(name, "value", value), "\n",
                    LineOf(name, "exp_avg", exp_avg), "\n",
                    LineOf(name, "exp_avg_sq", exp_avg_sq));
  }
  return lines;
}

}  // namespace tessera
#endif  // TESTS_CHECKPOINT_CHECKPOINT_STATE_H_
