#include "examples/resnet_cifar/resnet.h"

#include "torch/torch.h"

namespace nn = torch::nn;

namespace {

nn::Conv2d Conv(int64_t in, int64_t out, int64_t kernel, int64_t stride) {
  nn::Conv2d conv(nn::Conv2dOptions(in, out, kernel)
                      .stride(stride)
                      .padding(kernel / 2)
                      .bias(false));  // the following norm has one
  nn::init::kaiming_normal_(conv->weight, 0, torch::kFanOut, torch::kReLU);
  return conv;
}

}  // namespace

ResNetBlockImpl::ResNetBlockImpl(int64_t in, int64_t out, int64_t stride) {
  conv1_ = register_module("conv1", Conv(in, out, 3, stride));
  norm1_ = register_module("norm1", nn::BatchNorm2d(out));
  conv2_ = register_module("conv2", Conv(out, out, 3, 1));
  norm2_ = register_module("norm2", nn::BatchNorm2d(out));
  if (in != out || stride != 1) {
    shortcut_->push_back(Conv(in, out, 1, stride));
    shortcut_->push_back(nn::BatchNorm2d(out));
  }
  register_module("shortcut", shortcut_);
}

at::Tensor ResNetBlockImpl::forward(const at::Tensor& input) {
  at::Tensor x = at::relu(norm1_(conv1_(input)));
  x = norm2_(conv2_(x));
  return at::relu(x +
                  (shortcut_->is_empty() ? input : shortcut_->forward(input)));
}

ResNet18Impl::ResNet18Impl(const ResNetOptions& options) {
  stem_ = register_module("stem", Conv(3, options.width(), 3, 1));
  norm_ = register_module("norm", nn::BatchNorm2d(options.width()));
  int64_t in = options.width();
  for (int64_t stage = 0; stage < 4; ++stage) {
    const int64_t out = options.width() << stage;
    blocks_->push_back(ResNetBlock(in, out, stage == 0 ? 1 : 2));
    blocks_->push_back(ResNetBlock(out, out, 1));
    in = out;
  }
  register_module("blocks", blocks_);
  head_ = register_module("head", nn::Linear(in, options.classes()));
}

at::Tensor ResNet18Impl::forward(const at::Tensor& images) {
  at::Tensor x = at::relu(norm_(stem_(images)));
  x = blocks_->forward(x);
  return head_(x.mean({2, 3}));
}
