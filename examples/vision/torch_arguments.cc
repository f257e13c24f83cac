#include "examples/vision/torch_arguments.h"

#include <algorithm>
#include <cstddef>

namespace {

std::string Renamed(const std::string& word) {
  if (word.rfind("--", 0) != 0) return word;
  const size_t end = std::min(word.find('='), word.size());
  std::string name = word.substr(2, end - 2);
  std::replace(name.begin(), name.end(), '-', '_');
  if (name == "dist_url") name = "rendezvous";
  return "--" + name + word.substr(end);
}

}  // namespace

TorchArguments::TorchArguments(int argc_in, char** argv_in) : argc(argc_in) {
  for (int i = 0; i < argc_in; ++i) {
    words_.push_back(i == 0 ? argv_in[0] : Renamed(argv_in[i]));
  }
  for (std::string& word : words_) pointers_.push_back(word.data());
  pointers_.push_back(nullptr);  // as main's
  argv = pointers_.data();
}
