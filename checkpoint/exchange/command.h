// `tessera checkpoint` shows what checkpoints hold, whether they are whole, and
// how two differ. It needs neither the model nor the ranks that wrote them. No
// torch.
#ifndef CHECKPOINT_EXCHANGE_COMMAND_H_
#define CHECKPOINT_EXCHANGE_COMMAND_H_

#include <ostream>
#include <string>
#include <vector>

namespace tessera {

// Runs the command. `args` are the words after `tessera checkpoint`. Returns
// the exit status: 0, 1 if a checkpoint is damaged or missing (or two differ),
// 2 if the command is wrong.
int RunCheckpointCommand(const std::vector<std::string>& args,
                         std::ostream* out, std::ostream* err);

}  // namespace tessera
#endif  // CHECKPOINT_EXCHANGE_COMMAND_H_
