#include "verify/factored/oracle_adafactor.h"

#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <limits>

namespace tessera {
namespace {

double LineSum(const std::vector<double>& line) {
  double largest = 0;
  for (const double x : line) {
    if (std::isnan(x)) return std::nan("");
    largest = std::max(largest, x);
  }
  if (largest >= 0x1p576) return HUGE_VAL;
  int bin = -36;
  while (largest >= std::ldexp(1, 16 * bin)) ++bin;
  int digits = 53;
  while (std::ldexp(1, 53 - digits) < static_cast<double>(line.size())) {
    --digits;
  }
  const int unit = 16 * bin - 2 * digits;
  unsigned __int128 sum = 0;
  for (const double x : line) {
    sum += static_cast<unsigned __int128>(std::ldexp(x, -unit));
  }
  return std::ldexp(static_cast<double>(sum), unit);
}

// Returns `count` numbers from `first` on, `step` apart.
template <typename T>
std::vector<double> Line(const T* first, int64_t count, int64_t step) {
  std::vector<double> line;
  for (int64_t i = 0; i < count; ++i) line.push_back(first[i * step]);
  return line;
}

template <typename T>
void Approach(double mean, double weight, T* state) {
  const double before = *state;
  const double way = mean - before;
  const double part = way * weight;
  const double after = part + before;
  *state =
      std::isnan(after) ? static_cast<T>(std::nan("")) : static_cast<T>(after);
}

template <typename T>
T AtLeast(double least, T x) {
  return x < static_cast<T>(least) ? static_cast<T>(least) : x;
}

template <typename T>
T DirectionOf(T g, T v, double eps) {
  const T bounded = AtLeast<T>(eps * eps, v);
  const T root = std::sqrt(bounded);
  return g / root;
}

template <typename T>
double EpsOf(const OracleAdafactor& o) {
  return o.eps > 0 ? o.eps : std::numeric_limits<T>::epsilon();
}

// Handles a matrix, [R, C]; `direction` initially holds its gradient.
template <typename T>
void StepMatrix(int64_t R, int64_t C, double weight, const OracleAdafactor& o,
                T* rows, T* columns, T* direction) {
  const auto mean = [](std::vector<double> line) {
    for (double& x : line) x = x * x;
    return LineSum(line) / static_cast<double>(line.size());
  };
  for (int64_t r = 0; r < R; ++r) {
    Approach(mean(Line(direction + r * C, C, 1)), weight, rows + r);
  }
  for (int64_t c = 0; c < C; ++c) {
    Approach(mean(Line(direction + c, R, C)), weight, columns + c);
  }
  const double of_rows = LineSum(Line(rows, R, 1)) / static_cast<double>(R);
  for (int64_t r = 0; r < R; ++r) {
    const double quotient = rows[r] / AtLeast(EpsOf<T>(o), of_rows);
    const T row = static_cast<T>(quotient);
    for (int64_t c = 0; c < C; ++c) {
      T& x = direction[r * C + c];
      const T v = row * columns[c];
      x = DirectionOf(x, v, EpsOf<T>(o));
    }
  }
}

template <typename T>
at::Tensor DirectionAs(const std::vector<at::Tensor>& states,
                       const at::Tensor& gradient, int64_t step,
                       const OracleAdafactor& o) {
  const double weight = std::pow(static_cast<double>(step), o.beta2_decay);
  at::Tensor direction = gradient.to(at::kCPU).contiguous().clone();
  if (o.maximize) direction.neg_();
  std::vector<at::Tensor> here;
  for (const at::Tensor& s : states) {
    here.push_back(s.to(at::kCPU).contiguous());
  }
  T* const d = direction.mutable_data_ptr<T>();
  if (states.size() == 1) {
    T* const variance = here[0].mutable_data_ptr<T>();
    for (int64_t i = 0; i < direction.numel(); ++i) {
      const double g = d[i];
      Approach(g * g, weight, variance + i);
      d[i] = DirectionOf(d[i], variance[i], EpsOf<T>(o));
    }
  } else if (direction.numel() > 0) {
    const int64_t R = direction.size(-2), C = direction.size(-1);
    for (int64_t b = 0; b < direction.numel() / (R * C); ++b) {
      StepMatrix(R, C, weight, o, here[0].mutable_data_ptr<T>() + b * R,
                 here[1].mutable_data_ptr<T>() + b * C, d + b * R * C);
    }
  }
  for (size_t s = 0; s < states.size(); ++s) states[s].copy_(here[s]);
  return direction;
}

}  // namespace

std::vector<at::Tensor> OracleAdafactorStates(const at::Tensor& master) {
  std::vector<int64_t> rows = master.sizes().vec(), columns = rows;
  if (rows.size() < 2) return {torch::zeros(rows, master.options())};
  rows[rows.size() - 1] = 1;
  columns[columns.size() - 2] = 1;
  return {torch::zeros(rows, master.options()),
          torch::zeros(columns, master.options())};
}

at::Tensor OracleAdafactorDirection(const std::vector<at::Tensor>& states,
                                    const at::Tensor& gradient, int64_t step,
                                    const OracleAdafactor& options) {
  return gradient.scalar_type() == at::kDouble
             ? DirectionAs<double>(states, gradient, step, options)
             : DirectionAs<float>(states, gradient, step, options);
}

}  // namespace tessera
