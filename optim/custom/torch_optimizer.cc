// Where states are the engine's a new object makes each step, and is given the
// state of the one before: nothing of it outlives the step, so it does not
// matter where masters and states lie, and how they are cut.
#include "optim/custom/torch_optimizer.h"

#include <map>
#include <tuple>
#include <utility>

#include "ATen/ops/zeros.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "base/status.h"
#include "base/torch_guard.h"

namespace tessera {
namespace {

namespace optim = torch::optim;
using Tensors = std::vector<at::Tensor>;

// A class of libtorch, as it has been made.
struct Known {
  std::string name;
  TorchStates states;
};

// States that are tensors of a class `State`, by their accessors.
template <typename State>
struct Member {
  const char* name;
  const at::Tensor& (State::*get)() const noexcept;
  at::Tensor& (State::*reference)() noexcept;
};

template <typename State, typename SetSteps>
TorchStates StatesOf(std::vector<Member<State>> members, SetSteps set_steps) {
  TorchStates states;
  for (const auto& member : members) states.names.push_back(member.name);
  states.make = [=](int64_t steps, const Tensors& tensors) {
    auto state = std::make_unique<State>();
    set_steps(state.get(), steps);
    for (size_t i = 0; i < members.size(); ++i) {
      ((*state).*members[i].reference)() = tensors[i];
    }
    return state;
  };
  states.tensors = [=](const optim::OptimizerParamState& state) {
    Tensors tensors;
    for (const auto& member : members) {
      tensors.push_back((static_cast<const State&>(state).*member.get)());
    }
    return tensors;
  };
  return states;
}

// Returns the states of a class whose states count steps.
template <typename State>
TorchStates CountedStates(std::vector<Member<State>> members) {
  return StatesOf<State>(std::move(members), [](State* state, int64_t steps) {
    state->step(steps);
  });
}

#define TESSERA_MEMBER(State, member) \
  Member<State> { #member, &State::member, &State::member }

template <typename State>
TorchStates AdamStates(bool amsgrad) {
  std::vector<Member<State>> members = {TESSERA_MEMBER(State, exp_avg),
                                        TESSERA_MEMBER(State, exp_avg_sq)};
  if (amsgrad) members.push_back(TESSERA_MEMBER(State, max_exp_avg_sq));
  return CountedStates<State>(std::move(members));
}

TorchStates RmsPropStates(const optim::RMSpropOptions& o) {
  using State = optim::RMSpropParamState;
  std::vector<Member<State>> members = {TESSERA_MEMBER(State, square_avg)};
  if (o.momentum() > 0) {
    members.push_back(TESSERA_MEMBER(State, momentum_buffer));
  }
  if (o.centered()) members.push_back(TESSERA_MEMBER(State, grad_avg));
  return CountedStates<State>(std::move(members));
}

TorchStates SgdStates(const optim::SGDOptions& o) {
  using State = optim::SGDParamState;
  std::vector<Member<State>> members;
  if (o.momentum() != 0) {
    members.push_back(TESSERA_MEMBER(State, momentum_buffer));
  }
  return StatesOf<State>(std::move(members), [](State*, int64_t) {});
}

#undef TESSERA_MEMBER

// The very class: one that is made of it may keep more.
template <typename Class>
bool IsA(const optim::Optimizer& optimizer) {
  return typeid(optimizer) == typeid(Class);
}

std::optional<Known> KnownClass(const optim::Optimizer& optimizer) {
  const optim::OptimizerOptions& o = optimizer.param_groups()[0].options();
  if (IsA<optim::SGD>(optimizer)) {
    return Known{"torch::optim::SGD",
                 SgdStates(static_cast<const optim::SGDOptions&>(o))};
  }
  if (IsA<optim::Adagrad>(optimizer)) {
    using State = optim::AdagradParamState;
    return Known{"torch::optim::Adagrad",
                 CountedStates<State>({{"sum", &State::sum, &State::sum}})};
  }
  if (IsA<optim::RMSprop>(optimizer)) {
    return Known{"torch::optim::RMSprop",
                 RmsPropStates(static_cast<const optim::RMSpropOptions&>(o))};
  }
  if (IsA<optim::Adam>(optimizer)) {
    return Known{"torch::optim::Adam",
                 AdamStates<optim::AdamParamState>(
                     static_cast<const optim::AdamOptions&>(o).amsgrad())};
  }
  if (IsA<optim::AdamW>(optimizer)) {
    return Known{"torch::optim::AdamW",
                 AdamStates<optim::AdamWParamState>(
                     static_cast<const optim::AdamWOptions&>(o).amsgrad())};
  }
  return std::nullopt;
}

absl::StatusOr<std::unique_ptr<optim::Optimizer>> Make(
    const TorchFactory& factory, const at::Tensor& parameter) {
  std::unique_ptr<optim::Optimizer> made = factory({parameter});
  const bool good = made != nullptr && !made->param_groups().empty() &&
                    made->param_groups()[0].has_options() &&
                    made->param_groups()[0].params().size() == 1 &&
                    made->param_groups()[0].params()[0].is_same(parameter);
  if (good) return made;
  return absl::InvalidArgumentError(
      "FromTorch: the factory is to make an optimizer over the parameters that "
      "it is given");
}

void SetRate(optim::Optimizer* optimizer, double rate) {
  for (optim::OptimizerParamGroup& group : optimizer->param_groups()) {
    group.options().set_lr(rate);
  }
}

// Options without set_lr throw: here, and not in the first step.
absl::StatusOr<std::unique_ptr<optim::Optimizer>> MakeProbe(
    const TorchFactory& factory) {
  TESSERA_ASSIGN_OR_RETURN(auto probe, Make(factory, at::zeros({1})));
  SetRate(probe.get(), probe->param_groups()[0].options().get_lr());
  return probe;
}

void StepWith(optim::Optimizer* optimizer, at::Tensor parameter,
              const CustomStep& step) {
  SetRate(optimizer, step.options.lr);
  parameter.mutable_grad() = step.gradient;
  optimizer->step();
  parameter.mutable_grad() = at::Tensor();
}

// States that are the engine's.
absl::Status StepBound(const TorchFactory& factory, const TorchStates& states,
                       const CustomStep& step) {
  const at::Tensor parameter = step.master.detach();
  TESSERA_ASSIGN_OR_RETURN(const auto optimizer, Make(factory, parameter));
  std::unique_ptr<optim::OptimizerParamState>& state =
      optimizer->state()[parameter.unsafeGetTensorImpl()];
  if (step.step > 1) {
    state = states.make(step.step - 1, step.states);
    if (state == nullptr) {
      return absl::InvalidArgumentError("TorchStates::make has made none");
    }
  } else if (state == nullptr) {
    optimizer->state().erase(parameter.unsafeGetTensorImpl());
  }
  StepWith(optimizer.get(), parameter, step);
  const auto after = optimizer->state().find(parameter.unsafeGetTensorImpl());
  if (after == optimizer->state().end() || after->second == nullptr) {
    return absl::OkStatus();
  }
  const Tensors tensors = states.tensors(*after->second);
  if (tensors.size() != step.states.size()) {
    return absl::InvalidArgumentError(
        absl::StrCat("TorchStates::tensors: expected ", step.states.size(),
                     ", one for each name, got ", tensors.size()));
  }
  for (size_t i = 0; i < step.states.size(); ++i) {
    if (!tensors[i].defined() || tensors[i].is_same(step.states[i])) continue;
    step.states[i].copy_(tensors[i]);
  }
  return absl::OkStatus();
}

// States in objects of the class, by parameter and first element.
class OwnStates {
 public:
  explicit OwnStates(TorchFactory factory) : factory_(std::move(factory)) {}

  absl::Status Step(const CustomStep& step) {
    TESSERA_ASSIGN_OR_RETURN(Part* const part, PartOf(step));
    part->parameter.set_data(step.master);  // wherever it lies now
    StepWith(part->optimizer.get(), part->parameter, step);
    part->parameter.set_data(at::zeros({0}, step.master.options()));
    return absl::OkStatus();
  }

 private:
  struct Part {
    at::Tensor parameter;
    std::unique_ptr<optim::Optimizer> optimizer;
    int64_t steps = 0;
  };

  // With the first step it begins anew: another engine's are of no use.
  absl::StatusOr<Part*> PartOf(const CustomStep& step) {
    absl::MutexLock lock(&mutex_);
    Part& part = parts_[{std::string(step.parameter), step.begin, step.end}];
    if (step.step == 1) {
      part.parameter = step.master.detach();
      TESSERA_ASSIGN_OR_RETURN(part.optimizer, Make(factory_, part.parameter));
      part.steps = 0;
    }
    if (part.steps != step.step - 1) {
      return absl::FailedPreconditionError(absl::StrCat(
          "FromTorch: it has made ", part.steps, " steps of elements [",
          step.begin, ", ", step.end, "), expected ", step.step - 1,
          ": its states are its own, and neither saved nor moved; say what "
          "they are (TorchStates)"));
    }
    ++part.steps;
    return &part;
  }

  const TorchFactory factory_;
  absl::Mutex mutex_;
  std::map<std::tuple<std::string, int64_t, int64_t>, Part> parts_;
};

}  // namespace

absl::StatusOr<CustomOptimizer> FromTorch(TorchFactory factory,
                                          std::string name,
                                          std::optional<TorchStates> states) {
  if (factory == nullptr) {
    return absl::InvalidArgumentError("FromTorch: there is no factory");
  }
  if (states.has_value() &&
      (states->make == nullptr || states->tensors == nullptr)) {
    return absl::InvalidArgumentError(
        "FromTorch: TorchStates lacks a function: `make` or `tensors`");
  }
  TESSERA_ASSIGN_OR_RETURN(const auto probe, CatchTorch("FromTorch", [&] {
                             return MakeProbe(factory);
                           }));
  if (dynamic_cast<const optim::LBFGS*>(probe.get()) != nullptr) {
    return absl::UnimplementedError(
        "FromTorch: LBFGS is not elementwise, and asks for losses as it goes; "
        "shards of parameters cannot be stepped with it");
  }
  if (!states.has_value()) {
    if (std::optional<Known> known = KnownClass(*probe)) {
      states = std::move(known->states);
      if (name.empty()) name = std::move(known->name);
    }
  }
  if (name.empty()) {
    return absl::InvalidArgumentError(
        "FromTorch: expected a name for a class that is none of libtorch's");
  }
  CustomOptimizer custom;
  custom.name = std::move(name);
  custom.reads_rate_alone = true;
  custom.keeps_states = !states.has_value();
  if (!states.has_value()) {
    custom.step = [own = std::make_shared<OwnStates>(std::move(factory))](
                      const CustomStep& step) { return own->Step(step); };
    return custom;
  }
  custom.states = states->names;
  custom.step = [factory = std::move(factory),
                 states = *std::move(states)](const CustomStep& step) {
    return StepBound(factory, states, step);
  };
  return custom;
}

}  // namespace tessera
