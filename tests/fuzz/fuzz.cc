#include "tests/fuzz/fuzz.h"

#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "base/check.h"

namespace tessera {
namespace {

// Parsers often fail at these: the ends of ranges, and what overflows when a
// header's length is added or a count multiplied.
constexpr int64_t kNumbers[] = {0,
                                1,
                                -1,
                                2,
                                7,
                                8,
                                9,
                                63,
                                64,
                                127,
                                128,
                                255,
                                256,
                                248,
                                4095,
                                4096,
                                1 << 16,
                                1 << 20,
                                1 << 21,
                                INT32_MAX,
                                INT32_MIN,
                                1LL << 32,
                                1LL << 40,
                                INT64_MAX,
                                INT64_MIN,
                                INT64_MAX - 7,
                                INT64_MAX - 23,
                                INT64_MIN + 1,
                                -8,
                                4096LL << 32};

}  // namespace

std::string FuzzInputs::RandomBytes(size_t most) {
  std::string bytes(Below(most + 1), 0);
  for (char& byte : bytes) byte = static_cast<char>(random_());
  return bytes;
}

void FuzzInputs::ChangeNumber(std::string* input) {
  // The type is unsigned, since the largest number may overflow.
  const uint64_t number =
      static_cast<uint64_t>(kNumbers[Below(std::size(kNumbers))]) +
      (Below(4) == 0 ? uint64_t{input->size()} - 8 : 0);
  const size_t bytes = size_t{1} << Below(4);
  if (input->size() < bytes) return;
  // Fields begin at multiples of their size, mostly.
  size_t at = Below(input->size() - bytes + 1);
  if (Below(4) != 0) at = at / bytes * bytes;
  std::memcpy(input->data() + at, &number, bytes);
}

void FuzzInputs::MovePiece(std::string* input) {
  if (corpus_.empty()) return;
  const std::string& other = corpus_[Below(corpus_.size())];
  const size_t begin = Below(other.size());
  const size_t bytes = Below(other.size() - begin + 1);
  const size_t at = Below(input->size() + 1);
  const size_t instead =
      Below(2) == 0 ? 0 : std::min(bytes, input->size() - at);
  input->replace(at, instead, other, begin, bytes);
}

void FuzzInputs::ChangeOnce(std::string* input) {
  const size_t at = Below(input->size());
  switch (Below(8)) {
    case 0:
      if (!input->empty()) (*input)[at] ^= static_cast<char>(1 << Below(8));
      break;
    case 1:
      if (!input->empty()) (*input)[at] = static_cast<char>(random_());
      break;
    case 2:
      input->erase(at, Below(16));
      break;
    case 3:
      input->insert(at, RandomBytes(16));
      break;
    case 4:
      input->resize(Below(input->size() + 1));
      break;
    case 5:
      MovePiece(input);
      break;
    default:
      ChangeNumber(input);
  }
}

std::string FuzzInputs::Next() {
  if (corpus_.empty() || Below(8) == 0) return RandomBytes(512);
  std::string input = corpus_[Below(corpus_.size())];
  for (size_t left = 1 + Below(6); left > 0; --left) ChangeOnce(&input);
  return input;
}

void FeedSocket(absl::string_view input,
                const std::function<void(int fd)>& open,
                const std::function<bool()>& read) {
  int fds[2];
  TESSERA_CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK,
                           0, fds) == 0);
  open(fds[0]);
  bool goes_on = true;
  while (goes_on && !input.empty()) {
    // Half of them in few pieces.
    const auto byte = static_cast<unsigned char>(input.front());
    const size_t wanted = byte % 2 == 0 ? input.size() : 1 + byte;
    const ssize_t sent =
        send(fds[1], input.data(), std::min(wanted, input.size()),
             MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent < 0) break;  // what it has sent is not read, or it was closed
    input.remove_prefix(sent);
    goes_on = read();
  }
  close(fds[1]);
  if (goes_on) (void)read();
}

}  // namespace tessera
