// NoteBoard: one short text of each rank of a group, which the others read
// when they like. It takes no part in any collective: ranks may be anywhere in
// their training while threads beside it agree on what became of a save.
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

  // Puts `text` in the place of what this rank wrote before. False if nobody
  // has confirmed it within a second: write it again. LOCAL.
  virtual bool Write(const std::string& text) = 0;
  // What `ranks` have written last, "" before they have; nullopt if there was
  // no answer within a second, or the place of the notes is gone. LOCAL.
  virtual std::optional<std::vector<std::string>> Read(
      const std::vector<int>& ranks) = 0;
  // Unavailable, naming it, if the process of `rank` has ended or has left the
  // job. LOCAL.
  virtual absl::Status EndOf(int rank) const = 0;
  // How long a rank may be silent and not count as stopped: the collectives'
  // timeout.
  virtual absl::Duration patience() const = 0;
};

}  // namespace tessera
#endif  // COMM_NOTE_BOARD_H_
