#include "offload/slice_buffers.h"

#include <cstring>

#include "base/status.h"

namespace tessera {
namespace {

absl::Status WaitForAll(std::vector<SwapFuture>* futures) {
  absl::Status status;
  for (const SwapFuture& future : *futures) status.Update(future.Wait());
  futures->clear();
  return status;
}

}  // namespace

void SliceBuffer::StartRead(SwapFile* disk, size_t first_state) {
  const std::vector<StreamedUpdate::State>& states = unit->update.states;
  for (size_t i = first_state; i < states.size(); ++i) {
    if (!states[i].read) continue;
    const TieredBuffer& state = *states[i].buffer;
    const StreamUnit::Place& place = unit->places[i];
    const int64_t bytes = state.format().BytesOf(slice.numel());
    if (place.zeros) {
      std::memset(data[i], 0, static_cast<size_t>(bytes));
      continue;
    }
    reads.push_back(disk->Read(place.from, state.format().BytesOf(slice.begin),
                               data[i], bytes, state.what()));
  }
}

void SliceBuffer::StartWrite(SwapFile* disk) {
  const std::vector<StreamedUpdate::State>& states = unit->update.states;
  for (size_t i = 0; i < states.size(); ++i) {
    if (!states[i].written) continue;
    const TieredBuffer& state = *states[i].buffer;
    writes.push_back(disk->Write(
        unit->places[i].to, state.format().BytesOf(slice.begin), data[i],
        state.format().BytesOf(slice.numel()), state.what()));
  }
}

absl::Status SliceBuffer::AwaitRead() { return WaitForAll(&reads); }

absl::Status SliceBuffer::AwaitWritten() { return WaitForAll(&writes); }

bool SliceBuffer::IsWritten() const {
  return std::all_of(writes.begin(), writes.end(),
                     [](const SwapFuture& future) { return future.Done(); });
}

void SliceBuffer::CopyComputed(size_t state, char* all) const {
  const ElementFormat& format = computed->changed[state]->format();
  std::memcpy(all + format.BytesOf(slice.begin), data[state],
              static_cast<size_t>(format.BytesOf(slice.numel())));
}

absl::StatusOr<std::unique_ptr<SliceBuffers>> SliceBuffers::Allocate(
    SwapFile* disk, int count, int64_t states, int64_t state_bytes) {
  std::unique_ptr<SliceBuffers> made(new SliceBuffers(disk));
  made->buffers_.resize(static_cast<size_t>(count));
  if (states == 0) return made;
  for (SliceBuffer& buffer : made->buffers_) {
    TESSERA_ASSIGN_OR_RETURN(
        buffer.memory, AllocateCounted(states * state_bytes + kSwapAlignment,
                                       MemoryKind::kOptimizer));
    char* at = buffer.memory.data_as<char>();
    at += (kSwapAlignment - reinterpret_cast<uintptr_t>(at) % kSwapAlignment) %
          kSwapAlignment;
    for (int64_t i = 0; i < states; ++i) {
      buffer.data.push_back(at + i * state_bytes);
    }
  }
  return made;
}

void SliceBuffers::Register() {
  for (const SliceBuffer& buffer : buffers_) {
    if (buffer.data.empty()) continue;
    disk_->Register(buffer.data[0], buffer.memory.bytes() - kSwapAlignment);
  }
}

SliceBuffers::~SliceBuffers() {
  for (const SliceBuffer& buffer : buffers_) {
    if (!buffer.data.empty()) disk_->Unregister(buffer.data[0]);
  }
}

int64_t SliceBuffers::bytes() const {
  int64_t bytes = 0;
  for (const SliceBuffer& buffer : buffers_) bytes += buffer.memory.bytes();
  return bytes;
}

}  // namespace tessera
