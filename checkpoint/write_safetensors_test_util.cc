#include "checkpoint/write_safetensors_test_util.h"

#include <algorithm>
#include <fstream>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "base/torch/torch_scope.h"
#include "checkpoint/dtype_names.h"
#include "checkpoint/exchange/safetensors_header.h"

namespace tessera {

absl::Status WriteSafetensors(
    const std::string& path,
    const std::vector<std::pair<std::string, at::Tensor>>& tensors) {
  TorchScope scope;
  auto sorted = tensors;
  std::sort(sorted.begin(), sorted.end(), [](const auto& a, const auto& b) {
    const size_t left = a.second.element_size();
    const size_t right = b.second.element_size();
    return left != right ? left > right : a.first < b.first;
  });
  std::vector<SafetensorsTensor> told;
  for (const auto& [name, tensor] : sorted) {
    SafetensorsTensor& one = told.emplace_back();
    one.name = name;
    one.dtype_name = NameOfDtype(tensor.scalar_type());
    one.sizes = tensor.sizes().vec();
    one.bytes = static_cast<int64_t>(tensor.nbytes());
  }
  TESSERA_ASSIGN_OR_RETURN(const std::string header,
                           SafetensorsHeaderText(told, path));
  std::ofstream file(path, std::ios::binary);
  file << header;
  for (const auto& [name, tensor] : sorted) {
    const at::Tensor host =
        tensor.detach().resolve_conj().resolve_neg().cpu().contiguous();
    file.write(static_cast<const char*>(host.const_data_ptr()),
               static_cast<std::streamsize>(host.nbytes()));
  }
  file.close();
  return file.good() ? absl::OkStatus()
                     : absl::UnknownError(absl::StrCat(path, ": not written"));
}

}  // namespace tessera
