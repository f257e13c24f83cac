#include "engine/observe/monitor.h"

#include <cstddef>

#include "ATen/ops/_to_copy.h"
#include "absl/types/span.h"
#include "base/torch/torch_scope.h"
#include "monitor/histogram.h"

namespace tessera {

void Monitor::AddScalar(absl::string_view tag, double value) {
  if (!writes_) return;
  added_.scalars.push_back({std::string(tag), std::string(tag), value});
}

void Monitor::AddText(absl::string_view tag, absl::string_view text) {
  if (!writes_) return;
  added_.texts.push_back({std::string(tag), std::string(text)});
}

void Monitor::AddHistogram(absl::string_view tag, const at::Tensor& values) {
  if (!writes_) return;
  TorchScope scope;
  const at::Tensor plain =
      values.detach().to(at::kCPU, at::kDouble).contiguous();
  added_.histograms.push_back(
      {std::string(tag),
       HistogramOf(absl::MakeConstSpan(plain.const_data_ptr<double>(),
                                       static_cast<size_t>(plain.numel())))});
}

}  // namespace tessera
