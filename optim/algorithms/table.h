// The table of the optimizers: one line each; its row
// (optim/algorithms/algorithm.h) is in a file of this folder.
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

// Returns the name in optimizer.type: "AdamW".
const char* NameOf(Algorithm algorithm);
// Finds the first algorithm of exactly that name.
std::optional<Algorithm> FindAlgorithm(absl::string_view name);
// Whether its masters may have 16 bits; they may not where a step has several
// points or a direction.
bool TakesNarrowMasters(Algorithm algorithm);
// Returns all names, each once.
std::vector<std::string> AlgorithmNames();

}  // namespace tessera
#endif  // OPTIM_ALGORITHMS_TABLE_H_
