// The tensors of a value: of a tensor, and of the standard containers of such
// values. All other values have none.
#ifndef SHARDING_RECOMPUTE_CHECKPOINTED_TENSORS_OF_H_
#define SHARDING_RECOMPUTE_CHECKPOINTED_TENSORS_OF_H_

#include <array>
#include <cstddef>
#include <optional>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "ATen/core/Tensor.h"

namespace tessera::checkpoint_internal {

// Calls f(tensor) for each, in order.
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

}  // namespace tessera::checkpoint_internal
#endif  // SHARDING_RECOMPUTE_CHECKPOINTED_TENSORS_OF_H_
