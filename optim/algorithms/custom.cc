// A program's own (optim/custom), which is given the options that others have;
// and such a one that is given the rate alone.
#include "optim/algorithms/algorithm.h"

namespace tessera {
namespace {

constexpr Option kOptions[] = {{kLr, 1e-3},       {kWeightDecay, 0},
                               {kMaximize, 0},    {kEmaDecay, 0},
                               {kBeta1, 0.9},     {kBeta2, 0.999},
                               {kEps, 1e-8},      {kBiasCorrection, 1},
                               {kAmsGrad, 0},     {kMomentum, 0},
                               {kDampening, 0},   {kNesterov, 0},
                               {kAlpha, 0.99},    {kCentered, 0},
                               {kLrDecay, 0},     {kInitialAccumulatorValue, 0},
                               {kMinCoeff, 0.01}, {kMaxCoeff, 10}};
constexpr Option kOptionsOfRate[] = {{kLr, 1e-3}, {kEmaDecay, 0}};

Formula FormulaOf(const OptimizerOptions&) { return Formula::kCustom; }

// What else fits together is for the program to say.
constexpr char kWhyFloat32[] = ", of a program's own optimizer";

}  // namespace

constexpr AlgorithmRow kCustomRow = {.name = "Custom",
                                     .options = kOptions,
                                     .formula = FormulaOf,
                                     .check = CheckTrustRatio,
                                     .why_float32 = kWhyFloat32};

constexpr AlgorithmRow kCustomOfRateRow = {.name = "Custom",
                                           .options = kOptionsOfRate,
                                           .formula = FormulaOf,
                                           .why_float32 = kWhyFloat32};

}  // namespace tessera
