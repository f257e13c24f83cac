#include "tests/support/device_kernels.h"

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "ATen/Context.h"
#include "c10/core/impl/VirtualGuardImpl.h"
#include "optim/algorithms/coefficients.h"
#include "optim/cuda/norm_batches.h"
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
void AddToWords(NormBatch<T> batch, double p, uint64_t* words) {
  for (int i = 0; i < batch.count; ++i) {
    batch.segments[i].x = OnHost(batch.segments[i].x);
  }
  switch (NormPowerOf(p)) {
    case NormPower::kOne:
      return AddToNormOnHost<NormPower::kOne>(batch, 0, 1, words);
    case NormPower::kTwo:
      return AddToNormOnHost<NormPower::kTwo>(batch, 0, 1, words);
    case NormPower::kInfinity:
      return AddToNormOnHost<NormPower::kInfinity>(batch, 0, 1, words);
  }
}

template <typename T>
std::vector<Region> RegionsOf(const NormBatch<T>& batch,
                              const at::Tensor& sum) {
  std::vector<Region> regions = {Writes(sum)};
  for (int i = 0; i < batch.count; ++i) {
    const NormSegment<T>& segment = batch.segments[i];
    regions.push_back(
        Reads(segment.x, segment.numel * static_cast<int64_t>(sizeof(T))));
  }
  return regions;
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

  void AddToNorm(absl::Span<const NormPart> parts, double p,
                 const at::Tensor& sum) const override {
    uint64_t* const words = WordsOf(sum);
    VisitNormBatches(parts, [&](const auto& batch) {
      testdevice::Launch(
          CurrentStream(sum.device()), "AddToNorm", RegionsOf(batch, sum),
          [batch, p, words] { AddToWords(batch, p, OnHost(words)); });
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
    if (parts.empty()) return;
    CheckApart(formula, parts);
    std::vector<Region> regions;
    for (const StepPart& part : parts) AddRegions(formula, part, &regions);
    const double* values = nullptr;
    if (scalars.defined()) {
      regions.push_back(Reads(scalars));
      values = scalars.const_data_ptr<double>();
    }
    testdevice::Launch(
        CurrentStream(
            at::globalContext().getDeviceFromPtr(parts[0].range.master, kType)),
        "optimizer step", regions,
        [formula, values,
         all = std::vector<StepPart>(parts.begin(), parts.end())] {
          for (const StepPart& part : all) {
            StepCoefficients c = part.coefficients;
            if (values != nullptr) {
              const double* const found = OnHost(values);
              if (found[kSkip] != 0) return;
              c.gradient_factor = found[kFactor];
            }
            StepElements(formula, RangeOnHost(part.range), c);
          }
        });
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
  // Adds what a part reads and writes.
  static void AddRegions(Formula formula, const StepPart& part,
                         std::vector<Region>* regions) {
    const StepRange& range = part.range;
    const auto bytes = [&](NumberType type) {
      return BytesOf(type, range.numel);
    };
    regions->push_back(Reads(range.gradient, bytes(range.gradient_type)));
    if (range.new_master == nullptr) {
      regions->push_back(Writes(range.master, bytes(range.master_type)));
    } else {
      regions->push_back(Reads(range.master, bytes(range.master_type)));
      regions->push_back(Writes(range.new_master, bytes(range.master_type)));
    }
    for (int s = 0; s < StatesOf(formula).count; ++s) {
      regions->push_back(
          Writes(range.states[s],
                 BytesOf(range.state_type, range.in_block + range.numel)));
    }
    if (range.average != nullptr) {
      regions->push_back(
          Writes(range.average, bytes(AverageType(range.master_type))));
    }
    if (range.working_type != NumberType::kNone) {
      regions->push_back(Writes(range.working, bytes(range.working_type)));
    }
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
