// Gloo and libuv write to connections whose other end may be gone. Linux then
// sends SIGPIPE to the writing thread, which would end the process before the
// error of the write can be reported.
//
// The signal is blocked in the threads that write and in those that they start,
// which inherit that; the rest of the program is left as it is.
#ifndef BASE_SIGPIPE_H_
#define BASE_SIGPIPE_H_

#include <signal.h>

namespace tessera {

// Blocks SIGPIPE in this thread while it lives.
class SigpipeBlock {
 public:
  SigpipeBlock() {
    sigset_t pipe;
    sigemptyset(&pipe);
    sigaddset(&pipe, SIGPIPE);
    pthread_sigmask(SIG_BLOCK, &pipe, &before_);
  }
  ~SigpipeBlock() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  SigpipeBlock(const SigpipeBlock&) = delete;
  SigpipeBlock& operator=(const SigpipeBlock&) = delete;

 private:
  sigset_t before_;
};

}  // namespace tessera
#endif  // BASE_SIGPIPE_H_
