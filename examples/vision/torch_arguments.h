// Translates the arguments of PyTorch's distributed scripts to those of Init
// and absl's flags:
//
//   --dist-url tcp://host:port  file:///path  env://     --rendezvous=...
//   --world-size 8 --rank 3                              --world_size --rank
//   --batch-size 256                                     --batch_size
//
// Source: pytorch/examples, imagenet/main.py, and the many made after it.
#ifndef EXAMPLES_VISION_TORCH_ARGUMENTS_H_
#define EXAMPLES_VISION_TORCH_ARGUMENTS_H_

#include <string>
#include <vector>

// Holds argv with these names; dashes within names become '_', values stay as
// they are.
class TorchArguments {
 public:
  TorchArguments(int argc, char** argv);
  TorchArguments(const TorchArguments&) = delete;
  TorchArguments& operator=(const TorchArguments&) = delete;

  // Pass these to Init, which removes its own arguments. Valid as long as this.
  int argc;
  char** argv;

 private:
  std::vector<std::string> words_;
  std::vector<char*> pointers_;
};

#endif  // EXAMPLES_VISION_TORCH_ARGUMENTS_H_
