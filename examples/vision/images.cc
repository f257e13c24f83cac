#include "examples/vision/images.h"

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <optional>
#include <system_error>
#include <vector>

#include "ATen/Functions.h"
#include "absl/strings/str_cat.h"

namespace {

namespace fs = std::filesystem;

// Removes a folder at its end. Mapped files stay usable when their names are
// removed.
struct Removed {
  ~Removed() {
    std::error_code ignored;
    if (!folder.empty()) fs::remove_all(folder, ignored);
  }
  std::string folder;
};

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
  std::string folder = given;
  Removed made;
  if (folder.empty()) {
    std::error_code error;
    const fs::path place = fs::temp_directory_path(error);
    if (error) {
      return absl::UnavailableError(
          absl::StrCat("TMPDIR: ", error.message(), "; give --data"));
    }
    folder = (place / "tessera-images-XXXXXX").string();
    if (mkdtemp(folder.data()) == nullptr) {
      return absl::UnavailableError(
          absl::StrCat(folder, ": ", std::strerror(errno),
                       "; set TMPDIR to a folder that can be written to"));
    }
    made.folder = folder;
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
