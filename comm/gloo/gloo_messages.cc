#include "comm/gloo/gloo_messages.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "ATen/ops/zeros.h"
#include "absl/strings/str_cat.h"
#include "base/monotonic.h"
#include "base/status.h"
#include "base/torch/tensor_over.h"
#include "base/torch_guard.h"
#include "comm/gloo/text_record.h"

namespace tessera {

GlooMessages::GlooMessages(std::shared_ptr<GlooLinks> links, int rank,
                           int world_size)
    : links_(std::move(links)), rank_(rank), world_size_(world_size) {}

absl::Status GlooMessages::Run(
    std::vector<at::Tensor> memory,
    const std::function<absl::Status()>& collective) {
  met_.assign(world_size_, false);
  absl::Status status = CatchTorch("gloo", collective);
  if (!status.ok()) {
    Keep(std::make_shared<std::vector<at::Tensor>>(std::move(memory)));
    GlooLinks::Abandon(
        links_,
        std::make_shared<std::vector<std::shared_ptr<void>>>(std::move(kept_)));
  }
  kept_.clear();
  return status;
}

void GlooMessages::Keep(std::shared_ptr<void> memory) {
  kept_.push_back(std::move(memory));
}

absl::Status GlooMessages::WaitAll(const std::vector<Message>& messages) {
  for (const Message& message : messages) {
    const int peer = GlooLinks::PeerOf(*message);
    const absl::Duration begin = MonotonicNow();
    listener_.awaited(peer);
    TESSERA_RETURN_IF_ERROR(links_->Wait(*message));
    if (met_[peer]) continue;
    met_[peer] = true;
    listener_.waited(peer, MonotonicNow() - begin);
  }
  return absl::OkStatus();
}

absl::Status GlooMessages::MoveParts(uint32_t tag, const MovedParts& parts) {
  std::vector<Message> messages;
  for (int i = 1; i < world_size_; ++i) {
    const int peer = (rank_ + i) % world_size_;
    if (parts.received[peer].defined()) {
      messages.push_back(Receive(parts.received[peer], peer, tag));
    }
    if (parts.sent[peer].defined()) {
      messages.push_back(Send(parts.sent[peer], peer, tag));
    }
  }
  const at::Tensor& own = parts.received[rank_];
  if (own.defined() && parts.sent[rank_].defined()) {
    own.copy_(parts.sent[rank_]);
  }
  return WaitAll(messages);
}

void GlooMessages::PutOwn(const at::Tensor& shard,
                          const at::Tensor& whole) const {
  char* const own =
      static_cast<char*>(whole.mutable_data_ptr()) + rank_ * shard.nbytes();
  if (own == shard.const_data_ptr()) return;
  std::memcpy(own, shard.const_data_ptr(), shard.nbytes());
}

std::vector<int> GlooMessages::OtherPlaces(const std::vector<int>& ranks,
                                           int* own) const {
  const int size = static_cast<int>(ranks.size());
  *own = static_cast<int>(std::find(ranks.begin(), ranks.end(), rank_) -
                          ranks.begin());
  std::vector<int> places;
  for (int i = 1; i < size; ++i) places.push_back((*own + i) % size);
  return places;
}

absl::Status GlooMessages::GatherSlices(uint32_t tag,
                                        const std::vector<int>& ranks,
                                        const at::Tensor& whole,
                                        const std::vector<Slice>& slices) {
  auto slice_at = [&](int place) {
    return ElementsOver(whole, slices[place].begin, slices[place].numel);
  };
  std::vector<Message> messages;
  int own;
  for (int place : OtherPlaces(ranks, &own)) {
    if (slices[place].numel > 0) {
      messages.push_back(Receive(slice_at(place), ranks[place], tag));
    }
    if (slices[own].numel > 0) {
      messages.push_back(Send(slice_at(own), ranks[place], tag));
    }
  }
  return WaitAll(messages);
}

absl::StatusOr<std::vector<std::string>> GlooMessages::GatherTexts(
    uint32_t tag, const std::vector<int>& ranks, const std::string& mine) {
  const int size = static_cast<int>(ranks.size());
  auto texts = std::make_shared<std::vector<std::string>>(size);
  at::Tensor records = at::zeros({size * TextRecord::kBytes}, at::kByte);
  Keep(texts);
  Keep(std::make_shared<at::Tensor>(records));
  auto record_at = [&](int place) {
    return static_cast<char*>(records.mutable_data_ptr()) +
           place * TextRecord::kBytes;
  };
  int own;
  const std::vector<int> others = OtherPlaces(ranks, &own);
  const int64_t own_bytes = static_cast<int64_t>(mine.size());
  (*texts)[own] = mine;
  TextRecord::Write(mine, record_at(own));
  TESSERA_RETURN_IF_ERROR(
      GatherSlices(tag, ranks, records, Slices(records.numel(), size)));
  std::vector<Message> messages;
  for (int place : others) {
    std::string& text = (*texts)[place];
    const absl::StatusOr<int64_t> bytes =
        TextRecord::Read(record_at(place), &text);
    if (!bytes.ok()) {
      return Annotate(bytes.status(), absl::StrCat("rank ", ranks[place]));
    }
    if (*bytes > TextRecord::kInlineBytes) {
      text.resize(*bytes);
      messages.push_back(
          Receive(BytesOver(text.data(), *bytes), ranks[place], tag));
    }
    if (own_bytes > TextRecord::kInlineBytes) {
      messages.push_back(
          Send(BytesOver((*texts)[own].data(), own_bytes), ranks[place], tag));
    }
  }
  TESSERA_RETURN_IF_ERROR(WaitAll(messages));
  return *texts;
}

}  // namespace tessera
