// Summary: a table of a module's parts and parameters, as text.
//
//   module    class      parameters  dtype     frozen  unit
//   (model)   Net             1,413  float32   part    2 units
//     up      Linear            112  float32           up
//     norm    LayerNorm          32  float32   yes     up
//     head    Linear             85  float32           head
//   1,413 parameters (5.5 KiB): 1,381 trainable, 32 frozen; 0 numbers in
//   buffers
#ifndef ENGINE_SUMMARY_H_
#define ENGINE_SUMMARY_H_

#include <memory>
#include <string>

namespace torch::nn {
class Module;
}  // namespace torch::nn

namespace tessera {

class Engine;  // engine/engine.h

struct SummaryOptions {
  // Modules at most this deep have lines; deeper ones count with the module
  // that they are in. 0: the whole module alone; below 0: all.
  int depth = -1;
  // Adds the column `unit`, and a line with the bytes of model states that this
  // rank holds. Null: neither. It is the engine that trains the module.
  const Engine* engine = nullptr;
};

// Returns the table, a line per module in the order of registration: its path,
// class, number of parameters with those of the modules in it, their dtypes,
// whether they are frozen (need no gradient), and their units. A tied parameter
// counts once for each module that has it, and once in the sum. Reads no
// values, so parameters may be in shards, and the table is the same on all
// ranks except for the bytes that a rank holds. LOCAL.
std::string Summary(const torch::nn::Module& module,
                    const SummaryOptions& options = {});

}  // namespace tessera
#endif  // ENGINE_SUMMARY_H_
