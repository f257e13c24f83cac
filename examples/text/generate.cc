#include "examples/text/generate.h"

#include <algorithm>
#include <cstdio>

#include "ATen/CPUGeneratorImpl.h"
#include "ATen/Functions.h"
#include "c10/core/GradMode.h"

namespace {

// Draws one of the logits [vocab], which are in CPU memory.
int64_t Draw(const at::Tensor& logits, const GenerateOptions& options,
             const at::Generator& generator) {
  if (options.temperature <= 0) return at::argmax(logits).item<int64_t>();
  const auto draw = [&](const at::Tensor& of) {
    return at::multinomial(at::softmax(of / options.temperature, 0), 1,
                           /*replacement=*/false, generator)
        .item<int64_t>();
  };
  if (options.top_k <= 0) return draw(logits);
  const auto [values, indices] =
      at::topk(logits, std::min(options.top_k, logits.numel()));
  return indices[draw(values)].item<int64_t>();
}

}  // namespace

std::vector<int64_t> Generate(const Forward& forward,
                              std::vector<int64_t> prompt,
                              const GenerateOptions& options) {
  const c10::NoGradGuard no_grad;
  const at::Generator generator = at::detail::createCPUGenerator(options.seed);
  const size_t start = prompt.size();
  for (int64_t i = 0; i < options.count; ++i) {
    const auto seen =
        std::min<int64_t>(options.context, static_cast<int64_t>(prompt.size()));
    const std::vector<int64_t> last(prompt.end() - seen, prompt.end());
    const at::Tensor tokens = at::tensor(last, at::kLong);
    const at::Tensor logits =
        forward(tokens.unsqueeze(0))[0][-1].to(at::kCPU, at::kFloat);
    prompt.push_back(Draw(logits, options, generator));
  }
  return {prompt.begin() + static_cast<int64_t>(start), prompt.end()};
}

std::vector<int64_t> TokensOf(const std::string& text) {
  std::vector<int64_t> tokens;
  tokens.reserve(text.size());
  for (const char c : text) tokens.push_back(static_cast<unsigned char>(c));
  return tokens;
}

std::string TextOf(const std::vector<int64_t>& tokens) {
  std::string text;
  for (const int64_t token : tokens) {
    text += token >= 0 && token < 256 ? static_cast<char>(token) : '?';
  }
  return text;
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
