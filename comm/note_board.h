// NoteBoard: one short text of each rank of a group, which the others can read
// at any time. It uses no collectives: ranks may be anywhere in their training
// while other threads agree on the result of a save.
//
// Made by Communicator::ShareNotes.
//
// Threads: all calls may come from any thread.
#ifndef COMM_NOTE_BOARD_H_
#define COMM_NOTE_BOARD_H_

#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"

namespace tessera {

class NoteBoard {
 public:
  virtual ~NoteBoard() = default;

  // Replaces this rank's text. Returns false if that was not confirmed within a
  // second: write it again. LOCAL.
  virtual bool Write(const std::string& text) = 0;
  // Returns the last texts of `ranks`, "" for those that have not written;
  // nullopt if there was no answer within a second, or the board is gone.
  // LOCAL.
  virtual std::optional<std::vector<std::string>> Read(
      const std::vector<int>& ranks) = 0;
  // Returns Unavailable, with the rank, if the process of `rank` has ended or
  // has left the job. LOCAL.
  virtual absl::Status EndOf(int rank) const = 0;
  // How long a rank may be silent without counting as stopped: the collectives'
  // timeout.
  virtual absl::Duration patience() const = 0;
};

}  // namespace tessera
#endif  // COMM_NOTE_BOARD_H_
