// The commands `tessera checkpoint ...`, which need neither the model nor the
// ranks that wrote a checkpoint. No torch.
#ifndef CHECKPOINT_EXCHANGE_COMMAND_H_
#define CHECKPOINT_EXCHANGE_COMMAND_H_

#include <vector>

#include "base/command/command_line.h"

namespace tessera {

// Their exit status: 0; 1 if a checkpoint is damaged or missing, or two differ;
// 2 for wrong words.
std::vector<Command> CheckpointCommands();

}  // namespace tessera
#endif  // CHECKPOINT_EXCHANGE_COMMAND_H_
