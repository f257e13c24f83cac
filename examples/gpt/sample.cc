#include "examples/gpt/sample.h"

#include <algorithm>
#include <cstdio>
#include <utility>

#include "ATen/CPUGeneratorImpl.h"
#include "ATen/Functions.h"
#include "c10/core/GradMode.h"

namespace {

// The last `limit` bytes of `text` as tokens [1, T] on `device`.
at::Tensor Tokens(const std::string& text, int64_t limit, at::Device device) {
  const auto length = std::min<int64_t>(limit, text.size());
  auto tokens = at::empty({1, length}, at::kLong);
  auto* out = tokens.data_ptr<int64_t>();
  for (int64_t i = 0; i < length; ++i) {
    out[i] = static_cast<unsigned char>(text[text.size() - length + i]);
  }
  return tokens.to(device);
}

// Draws one byte from the logits [vocab], which lie in CPU memory.
char Draw(at::Tensor logits, const SampleOptions& options,
          at::Generator generator) {
  if (options.temperature <= 0) {
    return static_cast<char>(at::argmax(logits).item<int64_t>());
  }
  const int64_t count = options.top_k > 0
                            ? std::min(options.top_k, logits.numel())
                            : logits.numel();
  auto [values, indices] = at::topk(logits / options.temperature, count);
  auto drawn = at::multinomial(at::softmax(values, 0), 1,
                               /*replacement=*/false, std::move(generator));
  return static_cast<char>(indices[drawn.item<int64_t>()].item<int64_t>());
}

}  // namespace

std::string Sample(Gpt model, const std::string& prompt,
                   const SampleOptions& options) {
  c10::NoGradGuard no_grad;
  const bool was_training = model->is_training();
  model->eval();
  const auto device = model->parameters().front().device();
  auto generator = at::detail::createCPUGenerator(options.seed);
  std::string text = prompt.empty() ? "\n" : prompt;
  const size_t start = text.size();
  for (int64_t i = 0; i < options.bytes; ++i) {
    auto logits = model->forward(Tokens(text, model->options().seq(), device));
    text += Draw(logits[0][-1].to(at::kCPU, at::kFloat), options, generator);
  }
  model->train(was_training);
  return text.substr(start);
}

std::string Printable(const std::string& text) {
  std::string out;
  for (const char c : text) {
    if (c == '\n' || (c >= 0x20 && c < 0x7f)) {
      out += c;
      continue;
    }
    char escaped[5];
    std::snprintf(escaped, sizeof(escaped), "\\x%02x",
                  static_cast<unsigned>(static_cast<unsigned char>(c)));
    out += escaped;
  }
  return out;
}
