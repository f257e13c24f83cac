// What a client of the job's store and its server say to each other.
//
//   message   <count of fields, 4 bytes> (<size, 4> <bytes>)...
//   frame     <size of the message, 4> <message>
//
// A request is an operation's name and its arguments, an answer "ok" and its
// results, or "error" and why. Integers in fields are decimal. Sizes are
// little-endian. No torch.
#ifndef COMM_RENDEZVOUS_STORE_MESSAGES_H_
#define COMM_RENDEZVOUS_STORE_MESSAGES_H_

#include <cstddef>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"

namespace tessera {

using StoreMessage = std::vector<std::string>;  // its fields

// The largest frame; a larger one does not come from a rank. 10,000 ranks'
// addresses fit.
inline constexpr size_t kMaxStoreMessage = size_t{16} << 20;

std::string EncodeFrame(const StoreMessage& message);

// Takes the first whole frame from `*in`. Pure.
enum class Decoded { kMessage, kIncomplete, kNonsense };
Decoded TakeFrame(std::string* in, StoreMessage* message);

}  // namespace tessera
#endif  // COMM_RENDEZVOUS_STORE_MESSAGES_H_
