#include "engine/checkpoint/own_values.h"

#include <algorithm>

#include "ATen/CPUGeneratorImpl.h"
#include "ATen/Context.h"
#include "ATen/Functions.h"
#include "absl/strings/str_cat.h"

namespace tessera {

std::vector<NamedGenerator> GeneratorsOf(at::Device device) {
  std::vector<NamedGenerator> all = {
      {"generator/cpu", at::detail::getDefaultCPUGenerator()}};
  if (!device.is_cpu()) {
    all.push_back(
        {absl::StrCat("generator/", at::DeviceTypeName(device.type(), true)),
         at::globalContext().defaultGenerator(device)});
  }
  return all;
}

at::Tensor GeneratorState(const std::string& bytes) {
  at::Tensor tensor =
      at::empty({static_cast<int64_t>(bytes.size())}, at::kByte);
  std::copy(bytes.begin(), bytes.end(),
            static_cast<char*>(tensor.mutable_data_ptr()));
  return tensor;
}

}  // namespace tessera
