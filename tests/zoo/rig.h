// Rig is what a training loop of the zoo is written against, so that the same
// text runs with an engine and, as the reference, with plain libtorch.
//
//   ZOO_VARIANT(Siamese) {
//     auto net = std::make_shared<Tower>();
//     rig.TrainOn(net, [&] { return net->Loss(rig.Randn({4, 6})); });
//   }
//
// With plain libtorch a rank's backward is libtorch's own; gradients are
// averaged as docs/design.md promises, (g0 + g1 + ...) / W in rank order, in
// the parameter's dtype; the optimizer is at::_fused_adamw_ of whole masters,
// in float32 where parameters have 16 bits. It uses nothing of the engine or of
// verify's oracle.
//
// Threads: none of its own. All ranks make the same calls.
#ifndef TESTS_ZOO_RIG_H_
#define TESTS_ZOO_RIG_H_

#include <torch/torch.h>

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "comm/communicator.h"

namespace tessera::zoo {

namespace nn = torch::nn;
using at::Tensor;

// Says how a module is trained.
struct Recipe {
  std::string dtype = "fp32";  // of parameters; bf16, fp16
  bool fp32_norms = false;     // except those of norms
  std::string autocast;        // "bfloat16"
  int accumulation = 1;
  double clipping = 0;
  bool libtorch_exact = false;       // torch::optim::AdamW instead
  std::vector<std::string> ignored;  // parameters
};

// The training of one module. Errors are thrown.
class Training {
 public:
  virtual ~Training() = default;
  struct Loss {
    bool more_losses = false;
    bool retain_graph = false;
  };
  virtual void Backward(const Tensor& loss, Loss options) = 0;
  void Backward(const Tensor& loss) { Backward(loss, Loss()); }
  // Call it after each micro-batch.
  virtual void Step() = 0;
  virtual void SetRate(double rate) = 0;
  virtual Tensor UnderAutocast(const std::function<Tensor()>& forward) = 0;
  // Makes the module plain again; its parameters are what the optimizer has.
  virtual void Close() = 0;
};

// The values that a run leaves, by name.
using Results = std::vector<std::pair<std::string, Tensor>>;

class Rig {
 public:
  Rig(int rank, bool plain);
  virtual ~Rig() = default;
  Rig(const Rig&) = delete;
  Rig& operator=(const Rig&) = delete;

  // Takes the module over. The default generator is this rank's from then on.
  Training* Train(std::shared_ptr<nn::Module> module, const Recipe& recipe);
  Training* Train(std::shared_ptr<nn::Module> module) {
    return Train(std::move(module), Recipe());
  }
  // Runs the usual loop.
  void TrainOn(std::shared_ptr<nn::Module> module,
               const std::function<Tensor()>& loss, const Recipe& recipe = {},
               int steps = 3);

  // Runs a part of a forward, which a way may wrap: TrainOn's losses, and parts
  // that a variant names.
  virtual Tensor Part(const std::function<Tensor()>& part) { return part(); }

  // Returns data of this rank.
  Tensor Randn(at::IntArrayRef sizes) {
    return Drawn([&] { return torch::randn(sizes, data_); });
  }
  Tensor Tokens(int64_t below, at::IntArrayRef sizes) {
    return Drawn(
        [&] { return torch::randint(below, sizes, data_, torch::kLong); });
  }
  // Returns the same value on all ranks.
  Tensor Same(at::IntArrayRef sizes) {
    return Drawn([&] { return torch::randn(sizes, common_); });
  }
  // Records a value to compare.
  void Note(const Tensor& value);

  int rank() const { return rank_; }
  // Returns whether a variant has to write out what the engine does by itself.
  bool plain() const { return plain_; }

  // Closes what is trained, and returns all that is compared.
  Results Finish();
  // Returns "", or once the way is finished what else to expect of it besides
  // equal values.
  virtual std::string Outcome() { return ""; }

 protected:
  // All data that a variant asks for are drawn through this.
  virtual Tensor Drawn(const std::function<Tensor()>& draw) { return draw(); }
  virtual std::unique_ptr<Training> Make(std::shared_ptr<nn::Module> module,
                                         const Recipe& recipe) = 0;

 private:
  const int rank_;
  const bool plain_;
  at::Generator data_, common_;
  Results results_;
  std::vector<std::pair<std::shared_ptr<nn::Module>, std::unique_ptr<Training>>>
      trained_;
};

constexpr double kRate = 1e-2;
constexpr double kWeightDecay = 0.1;
constexpr double kLossScale = 128;  // for fp16

// `way` is a name of Ways().
std::unique_ptr<Rig> MakeEngineRig(absl::string_view way,
                                   std::shared_ptr<Communicator> comm);
std::unique_ptr<Rig> MakePlainRig(std::shared_ptr<Communicator> comm);
// Names how the engine runs.
std::vector<std::string> Ways();
std::string BackendOf(absl::string_view way);

// ---- the variants

struct Variant {
  void (*run)(Rig& rig) = nullptr;
  // If not empty, the engine must refuse it, on all ranks, in these words; with
  // may_be_equal it may refuse, where that depends on what is in memory.
  std::string error;
  bool may_be_equal = false;
};
std::map<std::string, Variant>& Variants();
bool AddVariant(const std::string& name, Variant variant);

#define ZOO_VARIANT(Name) ZOO_REFUSED_VARIANT(Name, "")
#define ZOO_REFUSED_VARIANT(Name, error) ZOO_ADD_VARIANT(Name, error, false)
#define ZOO_GUARDED_VARIANT(Name, error) ZOO_ADD_VARIANT(Name, error, true)
#define ZOO_ADD_VARIANT(Name, error, may_be_equal)                     \
  static void Name(::tessera::zoo::Rig& rig);                          \
  [[maybe_unused]] static const bool zoo_##Name =                      \
      ::tessera::zoo::AddVariant(#Name, {&Name, error, may_be_equal}); \
  static void Name(::tessera::zoo::Rig& rig)

}  // namespace tessera::zoo
#endif  // TESTS_ZOO_RIG_H_
