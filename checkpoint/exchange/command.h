// `tessera checkpoint`: what checkpoints hold, whether they are whole, how two
// differ. Needs neither the model nor the ranks that wrote them. No torch.
#ifndef CHECKPOINT_EXCHANGE_COMMAND_H_
#define CHECKPOINT_EXCHANGE_COMMAND_H_

#include <ostream>
#include <string>
#include <vector>

namespace tessera {

// `args`: what stands after `tessera checkpoint`. Returns the exit status: 0, 1
// if a checkpoint is damaged or is not there (or two differ), 2 if the command
// is wrong.
int RunCheckpointCommand(const std::vector<std::string>& args,
                         std::ostream* out, std::ostream* err);

}  // namespace tessera
#endif  // CHECKPOINT_EXCHANGE_COMMAND_H_
