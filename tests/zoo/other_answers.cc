// Lists which variants cannot be recomputed, or keep their activations, and
// why.
#include "tests/zoo/other_answers.h"

#include <algorithm>

namespace tessera::zoo {
namespace {

// The table has what a function that runs again may not do
// (Stage3Checkpointed).
const std::vector<OtherAnswer> kCheckpointed = {
    {"writes parameter",
     "a region may not write parameters: backward would write them again",
     {"ClampedInBfloat16", "EmbeddingWithMaxNorm"}},
    {"the function of a checkpointed region must do the same each time",
     "reads and changes a variable of the program's in the forward: a state, a "
     "counter; pass it as an argument, or change it outside",
     {"MixtureOfExpertsOfTheRanksChoice", "TruncatedBackpropagation"}},
};

// The table has the variants whose activations the tape keeps
// (Stage3Recompute), at least on some rank.
const std::vector<OtherAnswer> kRecomputed = {
    {"nothing was given up",
     "the parameters are the module's own, it has no children",
     {"AttentionWithBiasKvKdimVdim", "Bilinear", "ComplexSpectrum",
      "EmbeddingBag", "EmbeddingWithMaxNorm", "EmbeddingWithPadding",
      "IntegersAndBooleans", "LinearAlgebraOfParameters", "LstmWithProjection",
      "PackedGru", "PartsOfOneTensor", "PrunedByAMask", "RecurrenceByHand",
      "RootMeanSquareNorm", "SparseEmbedding", "SpectralNorm",
      "TruncatedBackpropagation", "WeightNorm"}},
    {"nothing was given up",
     "one child alone runs with gradients: the one that is open when Backward "
     "begins, which is kept",
     {"FrozenBackboneInEvaluation", "MixtureOfExpertsOfTheRanksChoice",
      "SpatialTransformer", "TransformerUnderAutocast"}},
    {"nothing was given up",
     "what the others save are inputs and parameters, which are held anyway",
     {"FrozenNormInEvaluation", "Lora", "LoraInBfloat16", "ScalarsAndEmptyOnes",
      "VectorQuantisation"}},
    {"nothing was given up",
     "the parameter is of two modules: its use begins neither",
     {"SharedByTwoModules"}},
};

}  // namespace

const OtherAnswer* FindOtherAnswer(absl::string_view way,
                                   absl::string_view variant) {
  static const std::vector<OtherAnswer> none;
  const auto& answers = way == "Stage3Checkpointed" ? kCheckpointed
                        : way == "Stage3Recompute"  ? kRecomputed
                                                    : none;
  for (const OtherAnswer& answer : answers) {
    const auto& names = answer.variants;
    if (std::find(names.begin(), names.end(), variant) != names.end()) {
      return &answer;
    }
  }
  return nullptr;
}

}  // namespace tessera::zoo
