// ResNet-18 for images of 32 x 32, as a plain torch::nn::Module.
//
//   images [B, 3, H, W] -> stem: conv 3x3, norm, relu
//     -> 4 stages of 2 blocks, of width w, 2w, 4w, 8w; the last 3 halve H, W
//     -> mean over H and W -> linear -> logits [B, classes]
//   block: relu(x + norm(conv(relu(norm(conv(x)))))); where the size changes, x
//     goes through a convolution of 1x1 and a norm
//
// This is the variant for CIFAR: ImageNet's ResNet-18 begins with a 7x7
// convolution of stride 2 and a pooling, which would leave 8 x 8 of the image;
// here the stem is a 3x3 convolution of stride 1. It has 11,173,962 parameters
// at w = 64.
//
// Source: He et al., 2015, with the initial values of their paper (normal, by
// the number of outputs).
#ifndef EXAMPLES_RESNET_CIFAR_RESNET_H_
#define EXAMPLES_RESNET_CIFAR_RESNET_H_

#include <cstdint>

#include "ATen/core/Tensor.h"
#include "torch/arg.h"
#include "torch/nn/module.h"
#include "torch/nn/modules/batchnorm.h"
#include "torch/nn/modules/container/sequential.h"
#include "torch/nn/modules/conv.h"
#include "torch/nn/modules/linear.h"
#include "torch/nn/pimpl.h"

struct ResNetOptions {
  TORCH_ARG(int64_t, width) = 64;  // channels of the first stage
  TORCH_ARG(int64_t, classes) = 10;
};

class ResNetBlockImpl : public torch::nn::Module {
 public:
  ResNetBlockImpl(int64_t in, int64_t out, int64_t stride);
  // Maps [B, in, H, W] to [B, out, H / stride, W / stride].
  at::Tensor forward(const at::Tensor& input);

 private:
  torch::nn::Conv2d conv1_{nullptr}, conv2_{nullptr};
  torch::nn::BatchNorm2d norm1_{nullptr}, norm2_{nullptr};
  torch::nn::Sequential shortcut_;  // empty where the size stays
};
TORCH_MODULE(ResNetBlock);

class ResNet18Impl : public torch::nn::Module {
 public:
  // Draws the initial values from torch's default generator.
  explicit ResNet18Impl(const ResNetOptions& options = ResNetOptions());
  // Maps [B, 3, H, W] floats to [B, classes].
  at::Tensor forward(const at::Tensor& images);

 private:
  torch::nn::Conv2d stem_{nullptr};
  torch::nn::BatchNorm2d norm_{nullptr};
  torch::nn::Sequential blocks_;
  torch::nn::Linear head_{nullptr};
};
TORCH_MODULE(ResNet18);

#endif  // EXAMPLES_RESNET_CIFAR_RESNET_H_
