// The way to the server holds ShardRequests, the way back ShardAnswers, each
// followed by its payload: the structs' bytes, little-endian.
//
// Why two connections for each pair of ranks, one a way: on one, a rank's
// requests would stand behind the megabytes that it answers with, and both
// would wait for each other's payloads. Why at most kTurnBytes a turn: one
// thread moves the bytes of all peers, and a fast one would starve the others.
// Why answers that nobody waits for any more are read all the same: the next
// one begins where they end.
#include "comm/serve/shard_streams.h"

#include <errno.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "comm/connect/sockets.h"

namespace tessera {
namespace {

constexpr int64_t kTurnBytes = 1 << 20;
constexpr int64_t kHeaderBytes = sizeof(ShardAnswer);
// No message is that long: the peer is not one of ours.
constexpr int64_t kMaxMessageBytes = 1 << 20;
// That of absl's last StatusCode.
constexpr int64_t kLastCode = 16;

// Nothing can be moved now; otherwise the connection is broken.
bool WouldBlock() { return errno == EAGAIN || errno == EINTR; }

// Could one of ours have sent it?
bool IsSound(const ShardAnswer& header) {
  if (header.code == 0) {
    return header.bytes >= 0 && header.bytes <= INT64_MAX - kHeaderBytes;
  }
  return header.code > 0 && header.code <= kLastCode && header.bytes >= 0 &&
         header.bytes <= kMaxMessageBytes;
}

}  // namespace

// ---- AskingEnd ----

void AskingEnd::Close() { CloseOnce(&fd_); }

void AskingEnd::Ask(const ShardRequest& request) {
  if (fd_ < 0) return;
  out_.append(reinterpret_cast<const char*>(&request), sizeof(request));
}

bool AskingEnd::Send() { return SendSome(fd_, &out_); }

bool AskingEnd::Receive() {
  int64_t budget = kTurnBytes;
  bool blocked = false;
  while (budget > 0 && !blocked) {
    if (!Next(&blocked, &budget)) return false;
  }
  return true;
}

bool AskingEnd::Next(bool* blocked, int64_t* budget) {
  char nowhere[16384];
  char* into = nowhere;
  int64_t bytes = 0;
  if (got_ < kHeaderBytes) {
    into = reinterpret_cast<char*>(&header_) + got_;
    bytes = kHeaderBytes - got_;
  } else {
    const int64_t at = got_ - kHeaderBytes;
    bytes = header_.bytes - at;
    if (place_ != nullptr) {
      into = place_ + at;
    } else {
      bytes = std::min<int64_t>(bytes, sizeof(nowhere));
    }
  }
  const ssize_t got = recv(
      fd_, into, std::min(bytes, std::max<int64_t>(*budget, 1)), MSG_DONTWAIT);
  if (got == 0) return false;
  if (got < 0) {
    *blocked = true;
    return WouldBlock();
  }
  got_ += got;
  *budget -= got;
  if (got_ == kHeaderBytes) {
    if (!IsSound(header_)) return false;
    if (header_.code == 0) {
      place_ = receiver_->PlaceFor(peer_, header_);
    } else {
      message_.resize(header_.bytes);
      place_ = message_.data();
    }
  }
  if (got_ >= kHeaderBytes && got_ == kHeaderBytes + header_.bytes) Finish();
  return true;
}

void AskingEnd::Finish() {
  const ShardAnswer done = header_;
  header_ = ShardAnswer();
  got_ = 0;
  place_ = nullptr;
  receiver_->Answered(
      peer_, done.ticket,
      absl::Status(static_cast<absl::StatusCode>(done.code), message_));
  message_.clear();
}

// ---- ServingEnd ----

void ServingEnd::Close() {
  CloseOnce(&fd_);
  out_.clear();
}

const char* ServingEnd::Outgoing::payload() const {
  return shard.defined() ? static_cast<const char*>(shard.const_data_ptr())
                         : message.data();
}

void ServingEnd::Answer(int64_t ticket, at::Tensor shard) {
  if (fd_ < 0) return;
  const auto bytes = static_cast<int64_t>(shard.nbytes());
  out_.push_back({{ticket, 0, bytes}, std::move(shard), ""});
}

void ServingEnd::Refuse(int64_t ticket, const absl::Status& error) {
  if (fd_ < 0) return;
  std::string message(error.message());
  const auto bytes = static_cast<int64_t>(message.size());
  out_.push_back({{ticket, static_cast<int64_t>(error.code()), bytes},
                  at::Tensor(),
                  std::move(message)});
}

bool ServingEnd::Send() {
  int64_t budget = kTurnBytes;
  while (!out_.empty() && budget > 0) {
    Outgoing& first = out_.front();
    const int64_t at = std::max<int64_t>(sent_ - kHeaderBytes, 0);
    const int64_t piece = std::min(first.header.bytes - at, budget);
    iovec parts[2];
    int count = 0;
    if (sent_ < kHeaderBytes) {
      parts[count++] = {reinterpret_cast<char*>(&first.header) + sent_,
                        static_cast<size_t>(kHeaderBytes - sent_)};
    }
    if (piece > 0) {
      parts[count++] = {const_cast<char*>(first.payload()) + at,
                        static_cast<size_t>(piece)};
    }
    msghdr message = {};
    message.msg_iov = parts;
    message.msg_iovlen = count;
    const ssize_t sent = sendmsg(fd_, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent < 0) return WouldBlock();
    sent_ += sent;
    budget -= sent;
    if (sent_ == kHeaderBytes + first.header.bytes) {
      out_.pop_front();
      sent_ = 0;
    }
  }
  return true;
}

bool ServingEnd::Receive(std::vector<ShardRequest>* requests) {
  if (!ReceiveSome(fd_, &in_, 64 * sizeof(ShardRequest))) return false;
  size_t at = 0;
  for (; in_.size() - at >= sizeof(ShardRequest); at += sizeof(ShardRequest)) {
    memcpy(&requests->emplace_back(), in_.data() + at, sizeof(ShardRequest));
  }
  in_.erase(0, at);
  return true;
}

}  // namespace tessera
