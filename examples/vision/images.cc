#include "examples/vision/images.h"

#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <optional>
#include <system_error>
#include <vector>

#include "ATen/Functions.h"
#include "absl/cleanup/cleanup.h"
#include "base/file.h"
#include "base/status.h"

namespace {

void Fill(const tessera::ImageSet& set, absl::Span<const int64_t> samples,
          const ConvertImage& convert, const tessera::BatchContext* context,
          const at::Tensor& images, const at::Tensor& labels) {
  float* out = images.data_ptr<float>();
  int64_t* label = labels.data_ptr<int64_t>();
  for (size_t i = 0; i < samples.size(); ++i) {
    std::optional<tessera::SampleRandom> random;
    if (context != nullptr) random = context->Random(static_cast<int64_t>(i));
    convert(set.image(samples[i]), random.has_value() ? &*random : nullptr,
            out);
    out += set.shape().image_bytes();
    *label++ = set.label(samples[i]);
  }
}

std::vector<int64_t> Sizes(const tessera::ImageSet& set, size_t batch) {
  return {static_cast<int64_t>(batch), set.channels(), set.height(),
          set.width()};
}

}  // namespace

absl::StatusOr<ImageSets> OpenOrMake(
    const std::string& given,
    const std::function<absl::Status(const std::string& folder)>& make,
    const std::function<absl::StatusOr<tessera::ImageSet>(
        const std::string& folder, tessera::ImageSplit split)>& open) {
  namespace fs = std::filesystem;
  std::string folder = given, made;
  // Mapped files stay usable when their names are removed.
  const absl::Cleanup remove = [&made] {
    std::error_code ignored;
    if (!made.empty()) fs::remove_all(made, ignored);
  };
  if (folder.empty()) {
    std::error_code error;
    const fs::path place = fs::temp_directory_path(error);
    if (error) return tessera::FileError(error.value(), "TMPDIR");
    folder = (place / "tessera-images-XXXXXX").string();
    if (mkdtemp(folder.data()) == nullptr) {
      return tessera::FileError(errno, folder);
    }
    made = folder;
    TESSERA_RETURN_IF_ERROR(make(folder));
  }
  TESSERA_ASSIGN_OR_RETURN(tessera::ImageSet train,
                           open(folder, tessera::ImageSplit::kTrain));
  TESSERA_ASSIGN_OR_RETURN(tessera::ImageSet test,
                           open(folder, tessera::ImageSplit::kTest));
  return ImageSets{std::move(train), std::move(test)};
}

tessera::Fetch FetchImages(const tessera::ImageSet* set, ConvertImage convert) {
  return
      [set, convert = std::move(convert)](absl::Span<const int64_t> samples,
                                          const tessera::BatchContext& context)
          -> absl::StatusOr<std::vector<at::Tensor>> {
        const at::Tensor images =
            context.Empty(Sizes(*set, samples.size()), at::kFloat);
        const at::Tensor labels =
            context.Empty({static_cast<int64_t>(samples.size())}, at::kLong);
        Fill(*set, samples, convert, &context, images, labels);
        return std::vector<at::Tensor>{images, labels};
      };
}

std::pair<at::Tensor, at::Tensor> ImagesOf(const tessera::ImageSet& set,
                                           absl::Span<const int64_t> samples,
                                           const ConvertImage& convert) {
  const at::Tensor images = at::empty(Sizes(set, samples.size()), at::kFloat);
  const at::Tensor labels =
      at::empty({static_cast<int64_t>(samples.size())}, at::kLong);
  Fill(set, samples, convert, nullptr, images, labels);
  return {images, labels};
}
