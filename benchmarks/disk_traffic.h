// DiskTraffic reads and writes a file in the background, half of each, as an
// update that streams through a disk does, while something else is measured.
#ifndef BENCHMARKS_DISK_TRAFFIC_H_
#define BENCHMARKS_DISK_TRAFFIC_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/memory/memory.h"
#include "base/status.h"
#include "offload/disk/swap_file.h"

namespace tessera {

class DiskTraffic {
 public:
  static absl::StatusOr<std::unique_ptr<DiskTraffic>> Start(
      const std::string& folder) {
    SwapOptions options;
    options.folder = folder;
    options.owner = "traffic";
    auto traffic = std::make_unique<DiskTraffic>();
    TESSERA_ASSIGN_OR_RETURN(traffic->file_, SwapFile::Create(options));
    TESSERA_ASSIGN_OR_RETURN(traffic->extent_,
                             traffic->file_->Allocate(kExtentBytes));
    TESSERA_ASSIGN_OR_RETURN(
        traffic->memory_,
        AllocateCounted(2 * kCallBytes + kSwapAlignment, MemoryKind::kOther));
    traffic->thread_ =
        std::thread([self = traffic.get()] { self->status_ = self->Run(); });
    return traffic;
  }
  ~DiskTraffic() { (void)Stop(); }
  // Returns how it went.
  absl::Status Stop() {
    stopping_ = true;
    if (thread_.joinable()) thread_.join();
    return status_;
  }
  int64_t bytes() const { return bytes_; }

 private:
  static constexpr int64_t kCallBytes = 4 << 20, kExtentBytes = 256 << 20;

  absl::Status Run() {
    char* from = memory_.data_as<char>();
    from += (kSwapAlignment - reinterpret_cast<uintptr_t>(from)) &
            (kSwapAlignment - 1);
    file_->Register(from, 2 * kCallBytes);
    absl::Status status;
    constexpr int64_t kHalf = kExtentBytes / 2;
    for (int64_t at = 0; !stopping_ && status.ok(); at += kCallBytes) {
      const SwapFuture written =
          file_->Write(extent_, at % kHalf, from, kCallBytes, "traffic");
      // The other half, which the first round writes.
      const bool holds = at >= kExtentBytes;
      const SwapFuture read =
          holds ? file_->Read(extent_, kHalf + at % kHalf, from + kCallBytes,
                              kCallBytes, "traffic")
                : file_->Write(extent_, kHalf + at % kHalf, from + kCallBytes,
                               kCallBytes, "traffic");
      status.Update(written.Wait());
      status.Update(read.Wait());
      bytes_ += 2 * kCallBytes;
    }
    file_->Unregister(from);
    return status;
  }

  std::shared_ptr<SwapFile> file_;
  SwapExtent extent_;
  CountedBuffer memory_;
  std::atomic<bool> stopping_{false};
  std::atomic<int64_t> bytes_{0};
  absl::Status status_;
  std::thread thread_;
};

}  // namespace tessera
#endif  // BENCHMARKS_DISK_TRAFFIC_H_
