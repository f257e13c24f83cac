// Checkpointed: activation checkpointing. Nothing that autograd would save in a
// function is kept for backward; backward runs the function again.
//
//   at::Tensor y = Checkpointed([&](const at::Tensor& x) { return block(x); },
//                               x);
//   CheckpointOptions options;
//   options.name = "block 3";
//   auto [a, b] = Checkpointed(options, function, x, mask, 0.5);
//
// It is torch.utils.checkpoint(use_reentrant=False), with the bits of a run
// without it: the graph is autograd's own, so any number of inputs and outputs,
// inputs without gradients, retain_graph, double backward and nesting work.
// Beyond that:
//   - what the function writes outside of itself (running statistics, counters,
//     an input in place) is written once, and what it reads there is what it
//     read in forward (the storage of what it writes is kept as it was before);
//     it may not write parameters that an engine owns;
//   - what was kept and is changed before backward is an error, even if
//     autograd itself would not have kept it;
//   - the function is stopped as soon as all that backward needs is there;
//   - operators may be kept instead (CheckpointOptions::policy, keep).
//
// The function's inputs are its arguments: tensors, also in std::vector,
// std::array, std::optional, std::pair and std::tuple, and other values, which
// are copied. Its captures must be alive until backward. It must do the same
// each time that it is run, may use the default generators of the CPU and of
// its inputs' devices, and must not call backward() (autograd::grad is fine).
// It is kept until all that it saved is released. So a tensor that it holds by
// value (`[cache]`) and writes with a gradient holds itself, until a backward
// releases what was saved; a graph that is dropped without one leaks. Pass such
// a tensor as an input instead, or capture it by reference.
//
// Threads: any.
#ifndef SHARDING_RECOMPUTE_CHECKPOINTED_CHECKPOINTED_H_
#define SHARDING_RECOMPUTE_CHECKPOINTED_CHECKPOINTED_H_

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "ATen/core/Tensor.h"
#include "c10/util/OptionalArrayRef.h"
#include "sharding/recompute/checkpointed/checkpoint_options.h"

namespace tessera {
namespace checkpoint_internal {

// TensorsOf<T>::Visit(value, f) calls f(tensor) for each tensor of a value, in
// order: for a tensor itself, and for those of the standard containers of such
// values. All other values have none.
template <typename T>
struct TensorsOf {
  template <typename F>
  static void Visit(T& value, F&& f) {
    if constexpr (std::is_base_of_v<at::Tensor, T>) f(value);
  }
};
template <typename Range>
struct TensorsOfRange {
  template <typename F>
  static void Visit(Range& values, F&& f) {
    for (auto& value : values) {
      TensorsOf<typename Range::value_type>::Visit(value, f);
    }
  }
};
template <typename T, typename A>
struct TensorsOf<std::vector<T, A>> : TensorsOfRange<std::vector<T, A>> {};
template <typename A>
struct TensorsOf<std::vector<bool, A>> {
  template <typename F>
  static void Visit(std::vector<bool, A>&, F&&) {}
};
template <typename T, size_t N>
struct TensorsOf<std::array<T, N>> : TensorsOfRange<std::array<T, N>> {};
template <typename T>
struct TensorsOf<std::optional<T>> {
  template <typename F>
  static void Visit(std::optional<T>& value, F&& f) {
    if (value.has_value()) TensorsOf<T>::Visit(*value, f);
  }
};
template <typename... T>
struct TensorsOf<std::tuple<T...>> {
  template <typename F>
  static void Visit(std::tuple<T...>& values, F&& f) {
    std::apply([&](T&... value) { (TensorsOf<T>::Visit(value, f), ...); },
               values);
  }
};
template <typename A, typename B>
struct TensorsOf<std::pair<A, B>> {
  template <typename F>
  static void Visit(std::pair<A, B>& values, F&& f) {
    TensorsOf<A>::Visit(values.first, f);
    TensorsOf<B>::Visit(values.second, f);
  }
};

// Takes them out, leaving undefined ones.
template <typename T>
std::vector<at::Tensor> TakeTensors(T* value) {
  std::vector<at::Tensor> tensors;
  TensorsOf<T>::Visit(*value, [&](at::Tensor& tensor) {
    tensors.push_back(std::exchange(tensor, at::Tensor()));
  });
  return tensors;
}

// Puts them back.
template <typename T>
void SetTensors(T* value, std::vector<at::Tensor> tensors) {
  size_t next = 0;
  TensorsOf<T>::Visit(
      *value, [&](at::Tensor& tensor) { tensor = std::move(tensors[next++]); });
}

// Runs the function with these tensors in place of those in its inputs.
using Rerun = std::function<void(std::vector<at::Tensor>)>;

// Returns whether autograd builds a graph on this thread.
bool GraphIsMade();

// Makes what autograd saves on this thread belong to the region, while it
// lives.
class Forward {
 public:
  // `regions` counts the regions of the function's type.
  Forward(const CheckpointOptions& options, std::atomic<int64_t>* regions,
          const std::vector<at::Tensor>& inputs, Rerun rerun);
  ~Forward();
  Forward(const Forward&) = delete;
  Forward& operator=(const Forward&) = delete;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

template <typename T>
inline constexpr bool kIsView = false;
template <typename T>
inline constexpr bool kIsView<at::ArrayRef<T>> = true;
template <typename T>
inline constexpr bool kIsView<at::OptionalArrayRef<T>> = true;
template <typename C>
inline constexpr bool kIsView<std::basic_string_view<C>> = true;

template <typename Fn>
std::atomic<int64_t>* RegionsOf() {
  static std::atomic<int64_t> regions{0};
  return &regions;
}

// Passes `value` as the original argument was: as an lvalue or an rvalue.
template <typename Arg, typename Value>
decltype(auto) As(Value& value) {
  if constexpr (std::is_lvalue_reference_v<Arg>) {
    return (value);
  } else {
    return std::move(value);
  }
}

template <typename... Args, typename Kept, size_t... I>
Rerun MakeRerun(std::shared_ptr<Kept> kept, std::index_sequence<I...>) {
  return [kept](std::vector<at::Tensor> tensors) {
    auto values = kept->values;
    auto fn = kept->fn;  // each run begins as the first did
    SetTensors(&values, std::move(tensors));
    std::invoke(fn, As<Args>(std::get<I>(values))...);
  };
}

}  // namespace checkpoint_internal

// Calls `fn` with `args`. LOCAL, unless `options` or `fn` say otherwise. Throws
// what `fn` throws; FailedPrecondition if it writes an engine's parameter.
// Backward throws libtorch's version error, or InvalidArgument where `fn` did
// not do the same again, naming the region, the operator and the tensor.
template <typename Fn, typename... Args>
auto Checkpointed(const CheckpointOptions& options, Fn&& fn, Args&&... args)
    -> std::invoke_result_t<Fn&, Args...> {
  namespace internal = checkpoint_internal;
  static_assert(
      (!internal::kIsView<std::decay_t<Args>> && ...),
      "pass a std::vector or a std::string: what a view (x.sizes(), a "
      "TensorList, a string_view) looks at may not be there in backward");
  if (!internal::GraphIsMade()) {
    return std::invoke(fn, std::forward<Args>(args)...);
  }
  struct Kept {
    std::decay_t<Fn> fn;
    std::tuple<std::decay_t<Args>...> values;  // without their tensors
  };
  auto kept = std::make_shared<Kept>(
      Kept{fn, std::tuple<std::decay_t<Args>...>(args...)});
  internal::Forward forward(
      options, internal::RegionsOf<std::decay_t<Fn>>(),
      internal::TakeTensors(&kept->values),
      internal::MakeRerun<Args...>(kept, std::index_sequence_for<Args...>()));
  return std::invoke(fn, std::forward<Args>(args)...);
}

template <typename Fn, typename... Args,
          std::enable_if_t<
              !std::is_base_of_v<CheckpointOptions, std::decay_t<Fn>>, int> = 0>
auto Checkpointed(Fn&& fn, Args&&... args)
    -> std::invoke_result_t<Fn&, Args...> {
  return Checkpointed(CheckpointOptions(), std::forward<Fn>(fn),
                      std::forward<Args>(args)...);
}

}  // namespace tessera
#endif  // SHARDING_RECOMPUTE_CHECKPOINTED_CHECKPOINTED_H_
