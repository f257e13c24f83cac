// Counts the engines that a program has let go without Engine::Close.
#ifndef ENGINE_PROGRAM_UNCLOSED_H_
#define ENGINE_PROGRAM_UNCLOSED_H_

#include <cstdint>

namespace tessera {

// Adds an engine that has trained and ends without Close. The engine's
// destructor calls it. LOCAL, any thread.
void NoteUnclosedEngine();

// Returns how many there were since the last call. RunMain warns of them if the
// program has ended well, since an error is a reason not to close. LOCAL.
int64_t TakeUnclosedEngines();

}  // namespace tessera
#endif  // ENGINE_PROGRAM_UNCLOSED_H_
