// SaveNotes are what the ranks of one save write to each other on a NoteBoard.
//
//   "<save's id> <count> busy "             at work
//   "<save's id> <count> written <file>"    a CheckpointFile: it is on the disk
//   "<save's id> <count> committed <file>"  and so is the manifest of its host
//   "<save's id> <count> failed <status>"   this rank could not
//   "<save's id> <count> ended <status>"    from rank 0: the save's result
//   "<save's id> <count> undone <status>"   as "ended", if it was taken back
//
// The count grows as long as the rank is at work.
#ifndef CHECKPOINT_SAVE_SAVE_NOTES_H_
#define CHECKPOINT_SAVE_SAVE_NOTES_H_

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "comm/note_board.h"

namespace tessera {

struct SaveNote {
  // "" before the rank has written a note of this save, or with `silent`.
  std::string kind;
  std::string text;
  std::string count;
  bool silent = false;  // the board was, so nothing is known of the rank
};

class SaveNotes {
 public:
  SaveNotes(NoteBoard* board, uint64_t id, int world_size);

  // Writes a note and waits until it is on the board. Returns false if rank 0,
  // which may keep the board, has ended or does not answer for the board's
  // patience.
  bool Tell(absl::string_view kind, absl::string_view text);
  // Writes the last note again, if a second has passed since. It tries once: if
  // the board does not answer the note is not written.
  void TellBusy();

  // Returns the notes of `ranks`.
  std::vector<SaveNote> Read(const std::vector<int>& ranks);
  // Returns an error if `rank`, whose `note` was read now, has ended or has
  // said nothing new for the board's patience.
  absl::Status CheckAlive(int rank, const SaveNote& note);
  // Restarts the patience for all ranks, since this rank did not listen.
  void ListenAnew();

 private:
  struct Heard {
    std::string last;
    absl::Duration since;  // MonotonicNow
  };

  NoteBoard* const board_;
  const std::string id_;
  std::vector<Heard> heard_;  // by rank
  absl::Duration last_busy_ = -absl::InfiniteDuration();
  std::string last_ = "busy ";
  int64_t count_ = 0;
};

}  // namespace tessera
#endif  // CHECKPOINT_SAVE_SAVE_NOTES_H_
