// A segment of a network that is recomputed in backward, by a backward of its
// own (a reentrant checkpoint).
#ifndef TESTS_MODELS_RECOMPUTED_H_
#define TESTS_MODELS_RECOMPUTED_H_

#include <torch/torch.h>

#include <functional>
#include <utility>

namespace tessera {

struct RecomputedSegment : torch::autograd::Function<RecomputedSegment> {
  using Segment = std::function<at::Tensor(const at::Tensor&)>;

  static at::Tensor forward(torch::autograd::AutogradContext* context,
                            const at::Tensor& x, const Segment& segment) {
    context->save_for_backward({x});
    context->saved_data["segment"] =
        c10::IValue::make_capsule(c10::make_intrusive<Holder>(segment));
    return segment(x);
  }
  static torch::autograd::variable_list backward(
      torch::autograd::AutogradContext* context,
      torch::autograd::variable_list gradients) {
    const auto holder = c10::static_intrusive_pointer_cast<Holder>(
        context->saved_data["segment"].toCapsule());
    at::Tensor x = context->get_saved_variables()[0].detach();
    x.requires_grad_(true);
    torch::AutoGradMode enable_grad(true);
    torch::autograd::backward({holder->segment(x)}, {gradients[0]});
    return {x.grad(), at::Tensor()};
  }

 private:
  struct Holder : torch::CustomClassHolder {
    explicit Holder(Segment s) : segment(std::move(s)) {}
    Segment segment;
  };
};

}  // namespace tessera
#endif  // TESTS_MODELS_RECOMPUTED_H_
