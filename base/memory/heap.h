// Sets how malloc treats freed memory.
#ifndef BASE_MEMORY_HEAP_H_
#define BASE_MEMORY_HEAP_H_

namespace tessera {

// These functions set what malloc does with freed memory, for the whole
// process, and override earlier calls of mallopt. glibc's settings in the
// environment (MALLOC_..., GLIBC_TUNABLES) take precedence, and any other
// malloc is left alone. LOCAL.

// Returns malloc's free memory to the system now, and makes it return what is
// freed later, until KeepFreedHeap: blocks of 128 KiB or more for which it has
// no room get mappings of their own. By default glibc learns to keep blocks of
// any size that was freed once, so what only a first step needs would stay for
// good. Further calls, and calls after KeepFreedHeap, do nothing.
void ReturnFreedHeap();

// Returns malloc's free memory to the system now, and makes it keep what is
// freed later: blocks of up to 32 MiB, and 2 GiB at its end. Training frees its
// activations in every step; glibc would return them to the kernel, which
// clears each page anew. Further calls do nothing.
void KeepFreedHeap();

}  // namespace tessera
#endif  // BASE_MEMORY_HEAP_H_
