// The two ends of a connection on which shards are asked for and answered:
//
//   AskingEnd   ---- requests ---->   ServingEnd    two connections for each
//               <--- answers ------                 pair of ranks, one a way
//
// Both are non-blocking: bytes move in Send and Receive, at most kTurnBytes in
// each call, so that peers take turns. Answers may come in any order. Payloads
// are sent from and received into the tensors' memory.
//
// Threads: one at a time.
#ifndef COMM_SERVE_SHARD_STREAMS_H_
#define COMM_SERVE_SHARD_STREAMS_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <string>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/status/status.h"

namespace tessera {

struct ShardRequest {
  // The version of a message that was posted to the asker; shards have others.
  static constexpr int64_t kPosted = -1;

  int64_t ticket = 0;  // the asker's name for it
  int64_t key = 0;
  int64_t version = 0;
  int64_t bytes = 0;  // what the asker expects

  bool is_posted() const { return version == kPosted; }
};

// What an answer begins with.
struct ShardAnswer {
  int64_t ticket = 0;
  int64_t code = 0;   // of a Status; not 0: the payload is its message
  int64_t bytes = 0;  // of the payload
};

class AskingEnd {
 public:
  class Receiver {
   public:
    virtual ~Receiver() = default;
    // Where the payload goes, `answer.bytes` bytes; null: nowhere.
    virtual char* PlaceFor(int peer, const ShardAnswer& answer) = 0;
    // The payload is there; or `error` is what the peer answered.
    virtual void Answered(int peer, int64_t ticket,
                          const absl::Status& error) = 0;
  };

  // Owns `fd`. `receiver` is borrowed and outlives this.
  AskingEnd(int fd, int peer, Receiver* receiver)
      : fd_(fd), peer_(peer), receiver_(receiver) {}
  ~AskingEnd() { Close(); }
  AskingEnd(const AskingEnd&) = delete;
  AskingEnd& operator=(const AskingEnd&) = delete;

  int fd() const { return fd_; }  // -1 once closed
  bool wants_to_send() const { return !out_.empty(); }
  void Ask(const ShardRequest& request);
  // False once the connection is of no more use.
  bool Send();
  bool Receive();
  // What comes of the answer under way goes nowhere.
  void DropPlace() { place_ = nullptr; }
  void Close();

 private:
  bool Next(bool* blocked, int64_t* budget);
  void Finish();

  int fd_;
  const int peer_;
  Receiver* const receiver_;
  std::string out_;  // requests, as they are sent
  ShardAnswer header_;
  int64_t got_ = 0;  // bytes of the header and the payload so far
  char* place_ = nullptr;
  std::string message_;
};

class ServingEnd {
 public:
  explicit ServingEnd(int fd) : fd_(fd) {}  // owns it
  ~ServingEnd() { Close(); }
  ServingEnd(const ServingEnd&) = delete;
  ServingEnd& operator=(const ServingEnd&) = delete;

  int fd() const { return fd_; }  // -1 once closed
  bool wants_to_send() const { return !out_.empty(); }
  // Answers that are not all sent.
  int64_t num_unsent() const { return static_cast<int64_t>(out_.size()); }
  // `shard` is contiguous and in host memory.
  void Answer(int64_t ticket, at::Tensor shard);
  void Refuse(int64_t ticket, const absl::Status& error);
  // False once the connection is of no more use.
  bool Send();
  bool Receive(std::vector<ShardRequest>* requests);
  void Close();

 private:
  struct Outgoing {
    ShardAnswer header;
    at::Tensor shard;  // or
    std::string message;
    const char* payload() const;
  };

  int fd_;
  std::deque<Outgoing> out_;
  int64_t sent_ = 0;  // bytes of the first one's header and payload
  std::string in_;    // less than a request
};

}  // namespace tessera
#endif  // COMM_SERVE_SHARD_STREAMS_H_
