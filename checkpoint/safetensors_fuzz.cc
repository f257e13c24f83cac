// Opens any bytes as a file and reads it whole: it gives an error that names
// the file, or tensors that lie within it one after the other.
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <string>

#include "ATen/ops/empty.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "checkpoint/safetensors.h"

namespace {

// Returns a file in memory, the same one for all inputs.
int FileOf(const uint8_t* data, size_t size) {
  static const int fd = memfd_create("safetensors", MFD_CLOEXEC);
  TESSERA_CHECK(fd >= 0);
  TESSERA_CHECK_EQ(ftruncate(fd, 0), 0);
  TESSERA_CHECK_EQ(pwrite(fd, data, size, 0), static_cast<ssize_t>(size));
  return fd;
}

void CheckTensor(const tessera::Safetensors& file,
                 const tessera::SafetensorsTensor& tensor, int64_t size) {
  TESSERA_CHECK(tensor.offset >= 8 && tensor.bytes >= 0 &&
                tensor.offset <= size - tensor.bytes);
  TESSERA_CHECK(file.Find(tensor.name) == &tensor);
  if (DtypeOf(tensor) == at::ScalarType::Undefined) {
    TESSERA_CHECK(!file.Read(tensor, {0, 0}, at::empty({0})).ok());
    return;
  }
  const at::ScalarType dtype = c10::toRealValueType(DtypeOf(tensor));
  const int64_t numel =
      tensor.numel * (c10::isComplexType(DtypeOf(tensor)) ? 2 : 1);
  TESSERA_CHECK_EQ(numel * static_cast<int64_t>(c10::elementSize(dtype)),
                   tensor.bytes);
  TESSERA_CHECK_OK(file.Read(tensor, {0, numel}, at::empty({numel}, dtype)));
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string path = absl::StrCat("/proc/self/fd/", FileOf(data, size));
  const auto file = tessera::Safetensors::Open(path);
  if (!file.ok()) {
    TESSERA_CHECK(absl::StartsWith(file.status().message(), path + ": "))
        << file.status().ToString();
    return 0;
  }
  int64_t bytes = 0;
  for (const tessera::SafetensorsTensor& tensor : (*file)->tensors()) {
    CheckTensor(**file, tensor, static_cast<int64_t>(size));
    if (DtypeOf(tensor) != at::ScalarType::Undefined) bytes += tensor.bytes;
  }
  TESSERA_CHECK_EQ((*file)->bytes_read(), bytes);
  return 0;
}
