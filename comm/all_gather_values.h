// Gathers values of all ranks by Communicator::AllGatherStrings, so that
// callers need not handle bytes.
//
//   std::vector<uint64_t> prints = ...;   // one per unit
//   TESSERA_ASSIGN_OR_RETURN(const auto all,
//                            AllGatherValues(comm, prints, {"prints"}));
//   all[rank][unit]
//
// T is trivially copyable and means the same on all ranks, which run one
// binary. All are COLLECTIVE, blocking, one exchange. Besides what the exchange
// returns they return Internal, on the ranks that see it, if a length cannot be
// right.
#ifndef COMM_ALL_GATHER_VALUES_H_
#define COMM_ALL_GATHER_VALUES_H_

#include <cstring>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "base/status.h"
#include "comm/communicator.h"

namespace tessera {

// Returns the values by rank; ranks may give different numbers of values.
template <typename T>
absl::StatusOr<std::vector<std::vector<T>>> AllGatherLists(
    Communicator* comm, const std::vector<T>& mine, CommTag tag) {
  static_assert(std::is_trivially_copyable_v<T>);
  const std::string what = tag.what;
  TESSERA_ASSIGN_OR_RETURN(
      const auto texts,
      comm->AllGatherStrings(
          absl::string_view(reinterpret_cast<const char*>(mine.data()),
                            mine.size() * sizeof(T)),
          std::move(tag)));
  std::vector<std::vector<T>> all;
  for (const std::string& text : texts) {
    if (text.size() % sizeof(T) != 0) {
      return absl::InternalError(
          absl::StrCat(what, ": rank ", all.size(), " sent ", text.size(),
                       " bytes, expected values of ", sizeof(T)));
    }
    all.emplace_back(text.size() / sizeof(T));
    if (!text.empty()) std::memcpy(all.back().data(), text.data(), text.size());
  }
  return all;
}

// Returns the values by rank; all ranks give the same number.
template <typename T>
absl::StatusOr<std::vector<std::vector<T>>> AllGatherValues(
    Communicator* comm, const std::vector<T>& mine, CommTag tag) {
  const std::string what = tag.what;
  TESSERA_ASSIGN_OR_RETURN(auto all,
                           AllGatherLists(comm, mine, std::move(tag)));
  for (size_t rank = 0; rank < all.size(); ++rank) {
    if (all[rank].size() == mine.size()) continue;
    return absl::InternalError(
        absl::StrCat(what, ": rank ", rank, " sent ", all[rank].size(),
                     " values, this rank ", mine.size()));
  }
  return all;
}

// Returns one value of each rank.
template <typename T>
absl::StatusOr<std::vector<T>> AllGatherValue(Communicator* comm, const T& mine,
                                              CommTag tag) {
  TESSERA_ASSIGN_OR_RETURN(
      const auto all,
      AllGatherValues(comm, std::vector<T>{mine}, std::move(tag)));
  std::vector<T> values;
  for (const auto& theirs : all) values.push_back(theirs[0]);
  return values;
}

// A value, and text of any length.
template <typename T>
struct ValueAndText {
  T value;
  std::string text;
};
template <typename T>
absl::StatusOr<std::vector<ValueAndText<T>>> AllGatherValueAndText(
    Communicator* comm, const T& mine, absl::string_view text, CommTag tag) {
  static_assert(std::is_trivially_copyable_v<T>);
  const std::string what = tag.what;
  std::string message(reinterpret_cast<const char*>(&mine), sizeof(T));
  message.append(text.data(), text.size());
  TESSERA_ASSIGN_OR_RETURN(const auto texts,
                           comm->AllGatherStrings(message, std::move(tag)));
  std::vector<ValueAndText<T>> all;
  for (const std::string& theirs : texts) {
    if (theirs.size() < sizeof(T)) {
      return absl::InternalError(
          absl::StrCat(what, ": rank ", all.size(), " sent ", theirs.size(),
                       " bytes, expected a value of ", sizeof(T)));
    }
    all.emplace_back();
    std::memcpy(&all.back().value, theirs.data(), sizeof(T));
    all.back().text = theirs.substr(sizeof(T));
  }
  return all;
}

}  // namespace tessera
#endif  // COMM_ALL_GATHER_VALUES_H_
