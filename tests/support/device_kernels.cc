#include "tests/support/device_kernels.h"

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "ATen/Context.h"
#include "ATen/Dispatch.h"
#include "ATen/ops/view_as_real.h"
#include "c10/core/impl/VirtualGuardImpl.h"
#include "optim/algorithms/coefficients.h"
#include "optim/cuda/norm_math.h"
#include "optim/device_kernels.h"
#include "testing/device/test_device.h"

namespace tessera {
namespace {

using testdevice::OnHost;
using testdevice::Region;

constexpr auto kType = c10::DeviceType::PrivateUse1;

c10::Stream CurrentStream(c10::Device device) {
  return c10::impl::VirtualGuardImpl(kType).getStream(device);
}

Region Reads(const void* begin, int64_t bytes) { return {begin, bytes, false}; }
Region Writes(const void* begin, int64_t bytes) { return {begin, bytes, true}; }
Region Reads(const at::Tensor& t) {
  return Reads(t.const_data_ptr(), static_cast<int64_t>(t.nbytes()));
}
Region Writes(const at::Tensor& t) {
  return Writes(t.const_data_ptr(), static_cast<int64_t>(t.nbytes()));
}

uint64_t* WordsOf(const at::Tensor& t) {
  return reinterpret_cast<uint64_t*>(t.mutable_data_ptr<int64_t>());
}

template <typename T>
void AddToWords(const T* x, int64_t numel, int64_t first, double p,
                uint64_t* words) {
  const NormSegment<T> segment(x, numel, first);
  switch (NormPowerOf(p)) {
    case NormPower::kOne:
      return AddToNormOnHost<NormPower::kOne>(segment, words);
    case NormPower::kTwo:
      return AddToNormOnHost<NormPower::kTwo>(segment, words);
    case NormPower::kInfinity:
      return AddToNormOnHost<NormPower::kInfinity>(segment, words);
  }
}

// Returns the range at the address where the host finds the memory.
StepRange RangeOnHost(StepRange range) {
  range.master = OnHost(range.master);
  for (void*& state : range.states) {
    if (state != nullptr) state = OnHost(state);
  }
  range.gradient = OnHost(range.gradient);
  if (range.new_master != nullptr) range.new_master = OnHost(range.new_master);
  if (range.average != nullptr) range.average = OnHost(range.average);
  if (range.working != nullptr) range.working = OnHost(range.working);
  return range;
}

class TestDeviceKernels final : public DeviceKernels {
 public:
  bool HasNorm(double p, at::ScalarType dtype) const override {
    return HasNormPower(p) && (!at::isComplexType(dtype) || p == 2);
  }

  void AddToNorm(const at::Tensor& segment, int64_t first, double p,
                 const at::Tensor& sum) const override {
    if (segment.is_complex()) {
      return AddToNorm(at::view_as_real(segment).flatten(), 2 * first, p, sum);
    }
    const int64_t numel = segment.numel();
    if (numel == 0) return;
    AT_DISPATCH_FLOATING_TYPES_AND2(
        at::kHalf, at::kBFloat16, segment.scalar_type(), "AddToNorm", [&] {
          const auto* const x = segment.const_data_ptr<scalar_t>();
          uint64_t* const words = WordsOf(sum);
          testdevice::Launch(
              CurrentStream(segment.device()), "AddToNorm",
              {Reads(segment), Writes(sum)}, [x, numel, first, p, words] {
                AddToWords(OnHost(x), numel, first, p, OnHost(words));
              });
        });
  }

  void FinishNorm(const at::Tensor& all, const NormFinish& finish,
                  const at::Tensor& scalars) const override {
    const int64_t ranks = all.numel() / kNormWords;
    const auto* const words =
        reinterpret_cast<const uint64_t*>(all.const_data_ptr<int64_t>());
    double* const to = scalars.mutable_data_ptr<double>();
    testdevice::Launch(
        CurrentStream(all.device()), "FinishNorm",
        {Reads(all), Writes(scalars)}, [words, ranks, finish, to] {
          FinishNormOnHost(OnHost(words), ranks, finish, OnHost(to));
        });
  }

  void Step(Formula formula, absl::Span<const StepPart> parts,
            const at::Tensor& scalars) const override {
    CheckApart(formula, parts);
    for (const StepPart& part : parts) StepOne(formula, part, scalars);
  }

 private:
  // A device does all parts at once, so none may write what another one does,
  // such as a block of states of 8 bits.
  static void CheckApart(Formula formula, absl::Span<const StepPart> parts) {
    const char* end = nullptr;
    for (const StepPart& part : parts) {
      const StepRange& r = part.range;
      const auto* const begin = static_cast<const char*>(r.states[0]);
      if (StatesOf(formula).count == 0) return;
      TORCH_CHECK(begin >= end, "two parts of a step write the same states");
      end = begin + BytesOf(r.state_type, r.in_block + r.numel);
    }
  }
  static void StepOne(Formula formula, const StepPart& part,
                      const at::Tensor& scalars) {
    const StepRange& range = part.range;
    const auto bytes = [&](NumberType type) {
      return BytesOf(type, range.numel);
    };
    std::vector<Region> regions = {
        Reads(range.gradient, bytes(range.gradient_type))};
    if (range.new_master == nullptr) {
      regions.push_back(Writes(range.master, bytes(range.master_type)));
    } else {
      regions.push_back(Reads(range.master, bytes(range.master_type)));
      regions.push_back(Writes(range.new_master, bytes(range.master_type)));
    }
    for (int s = 0; s < StatesOf(formula).count; ++s) {
      regions.push_back(
          Writes(range.states[s],
                 BytesOf(range.state_type, range.in_block + range.numel)));
    }
    if (range.average != nullptr) {
      regions.push_back(
          Writes(range.average, bytes(AverageType(range.master_type))));
    }
    if (range.working_type != NumberType::kNone) {
      regions.push_back(Writes(range.working, bytes(range.working_type)));
    }
    const double* values = nullptr;
    if (scalars.defined()) {
      regions.push_back(Reads(scalars));
      values = scalars.const_data_ptr<double>();
    }
    testdevice::Launch(
        CurrentStream(
            at::globalContext().getDeviceFromPtr(range.master, kType)),
        "optimizer step", regions,
        [formula, range, c = part.coefficients, values]() mutable {
          if (values != nullptr) {
            const double* const found = OnHost(values);
            if (found[kSkip] != 0) return;
            c.gradient_factor = found[kFactor];
          }
          StepElements(formula, RangeOnHost(range), c);
        });
  }
};

}  // namespace

void RegisterTestDeviceKernels() {
  static const auto* const kernels = [] {
    auto* const made = new TestDeviceKernels();
    RegisterDeviceKernels(kType, made);
    return made;
  }();
  (void)kernels;
}

}  // namespace tessera
