// NoThreads imitates a system that has no threads left, for tests.
#ifndef BASE_THREAD_NO_THREADS_TEST_UTIL_H_
#define BASE_THREAD_NO_THREADS_TEST_UTIL_H_

#include <pthread.h>

#include <cstddef>

#include "base/check.h"

namespace tessera {

// While it lives no thread of this process can be started: the stack that each
// would get is larger than any address space.
class NoThreads {
 public:
  NoThreads() {
    TESSERA_CHECK_EQ(pthread_getattr_default_np(&before_), 0);
    pthread_attr_t huge;
    TESSERA_CHECK_EQ(pthread_attr_init(&huge), 0);
    TESSERA_CHECK_EQ(pthread_attr_setstacksize(&huge, size_t{1} << 60), 0);
    TESSERA_CHECK_EQ(pthread_setattr_default_np(&huge), 0);
    pthread_attr_destroy(&huge);
  }
  ~NoThreads() {
    pthread_setattr_default_np(&before_);
    pthread_attr_destroy(&before_);
  }
  NoThreads(const NoThreads&) = delete;
  NoThreads& operator=(const NoThreads&) = delete;

 private:
  pthread_attr_t before_;
};

}  // namespace tessera
#endif  // BASE_THREAD_NO_THREADS_TEST_UTIL_H_
