// The table of the optimizers: a line for each, which has its row
// (optim/algorithms/algorithm.h) in a file of this room.
#ifndef OPTIM_ALGORITHMS_TABLE_H_
#define OPTIM_ALGORITHMS_TABLE_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"

namespace tessera {

// ROW(Name): Algorithm::kName, whose row is kNameRow. In the order in which
// messages list them.
#define TESSERA_ALGORITHMS(ROW) \
  ROW(Adam)                     \
  ROW(AdamW)                    \
  ROW(Sgd)                      \
  ROW(Adagrad)                  \
  ROW(RmsProp)                  \
  ROW(Lion)                     \
  ROW(Lamb)                     \
  ROW(Muon)                     \
  ROW(Adafactor)                \
  ROW(ScheduleFree)             \
  ROW(Custom)                   \
  ROW(CustomOfRate)

enum class Algorithm : uint8_t {
#define TESSERA_ROW(name) k##name,
  TESSERA_ALGORITHMS(TESSERA_ROW)
#undef TESSERA_ROW
};

struct AlgorithmRow;  // optim/algorithms/algorithm.h
const AlgorithmRow& RowOf(Algorithm algorithm);

// "AdamW": as optimizer.type has it.
const char* NameOf(Algorithm algorithm);
// The first of that name, as it is spelled.
std::optional<Algorithm> FindAlgorithm(absl::string_view name);
// Whether its masters may have 16 bits: those whose steps are of several
// points, or by directions, may not.
bool TakesNarrowMasters(Algorithm algorithm);
// All names, each once.
std::vector<std::string> AlgorithmNames();

}  // namespace tessera
#endif  // OPTIM_ALGORITHMS_TABLE_H_
