#include "sharding/gradient/gradient_forecast.h"

namespace tessera {

GradientForecast::GradientForecast(const absl::flat_hash_set<int64_t>& sizes) {
  for (int64_t bytes : sizes) sizes_[bytes];
}

void GradientForecast::Begin() {
  for (auto& [bytes, size] : sizes_) size.now.clear();
}

int GradientForecast::Next(int64_t bytes) {
  Size& size = sizes_.find(bytes)->second;
  const size_t k = size.now.size();
  size.now.push_back(kNone);
  const bool agreed = k < size.before.size() && k < size.last.size() &&
                      size.before[k] == size.last[k];
  return agreed ? size.last[k] : kNone;
}

void GradientForecast::Lies(int64_t bytes, const void* data) {
  at_[data] = {bytes, sizes_.find(bytes)->second.now.size() - 1};
}

void GradientForecast::Became(const void* data, int64_t bytes, int parameter) {
  const auto found = at_.find(data);
  if (found == at_.end()) return;
  // What lay there may be gone, and this an allocation that was not followed.
  const auto [bytes_there, k] = found->second;
  if (bytes_there == bytes) sizes_.find(bytes)->second.now[k] = parameter;
}

void GradientForecast::End() {
  for (auto& [bytes, size] : sizes_) {
    size.before.swap(size.last);
    size.last.swap(size.now);
  }
  at_.clear();
}

}  // namespace tessera
