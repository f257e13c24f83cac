#include "checkpoint/copy_memory.h"

#include <errno.h>
#include <sys/mman.h>

#include <cstring>
#include <utility>

#include "absl/status/status.h"
#include "base/memory/memory.h"
#include "base/status.h"

namespace tessera {
namespace {

constexpr int64_t kHugePage = 2 << 20;

constexpr char kWhat[] = "a copy of the state";

// Unmaps the memory. Where a process has its maximum of mappings, the kernel
// cannot cut one in two (adjacent mappings are one to it); then this gives back
// the pages only.
void GiveBack(char* data, int64_t bytes) {
  const auto length = static_cast<size_t>(bytes);
  if (length == 0 || munmap(data, length) == 0) return;
  (void)madvise(data, length, MADV_DONTNEED);
}

}  // namespace

absl::StatusOr<CopyMemory> CopyMemory::Allocate(int64_t bytes, Pages pages) {
  if (bytes == 0) return CopyMemory();
  MemoryLedger& ledger = MemoryLedger::Host();
  TESSERA_RETURN_IF_ERROR(ledger.Claim(MemoryKind::kOther, bytes, kWhat));
  const auto length = static_cast<size_t>(bytes);
  void* const data = mmap(nullptr, length, PROT_READ | PROT_WRITE,
                          MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (data == MAP_FAILED) {
    const int error = errno;
    ledger.Remove(MemoryKind::kOther, bytes);
    return ledger.Refused(bytes, kWhat, std::strerror(error));
  }
  if (pages == Pages::kHuge) {
    (void)madvise(data, length, MADV_HUGEPAGE);  // a kernel may have none
  }
  return CopyMemory(static_cast<char*>(data), bytes);
}

CopyMemory& CopyMemory::operator=(CopyMemory&& other) noexcept {
  if (this == &other) return *this;
  FreeUpTo(bytes_);
  data_ = std::exchange(other.data_, nullptr);
  bytes_ = std::exchange(other.bytes_, 0);
  freed_ = std::exchange(other.freed_, 0);
  unmapped_ = std::exchange(other.unmapped_, 0);
  return *this;
}

void CopyMemory::FreeUpTo(int64_t end) {
  if (end <= freed_) return;
  MemoryLedger::Host().Remove(MemoryKind::kOther, end - freed_);
  freed_ = end;
  const int64_t unmap = end == bytes_ ? end : end / kHugePage * kHugePage;
  GiveBack(data_ + unmapped_, unmap - unmapped_);
  unmapped_ = unmap;
}

}  // namespace tessera
