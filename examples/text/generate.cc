#include "examples/text/generate.h"

#include <algorithm>

#include "ATen/CPUGeneratorImpl.h"
#include "ATen/Functions.h"
#include "c10/core/GradMode.h"

std::vector<int64_t> Generate(const Forward& forward,
                              std::vector<int64_t> prompt,
                              const GenerateOptions& options) {
  const c10::NoGradGuard no_grad;
  at::Generator generator = at::detail::createCPUGenerator(options.seed);
  const size_t start = prompt.size();
  for (int64_t i = 0; i < options.count; ++i) {
    const auto seen =
        std::min<int64_t>(options.context, static_cast<int64_t>(prompt.size()));
    const std::vector<int64_t> last(prompt.end() - seen, prompt.end());
    const at::Tensor tokens = at::tensor(last, at::kLong);
    const at::Tensor logits =
        forward(tokens.unsqueeze(0))[0][-1].to(at::kCPU, at::kFloat);
    const at::Tensor next =
        options.temperature <= 0
            ? at::argmax(logits)
            : at::multinomial(at::softmax(logits / options.temperature, 0), 1,
                              /*replacement=*/false, generator);
    prompt.push_back(next.item<int64_t>());
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
    const bool printable = token == '\n' || (token >= 0x20 && token < 0x7f);
    text += printable ? static_cast<char>(token) : '?';
  }
  return text;
}
