// The heap of the process, malloc's.
#ifndef BASE_HEAP_H_
#define BASE_HEAP_H_

namespace tessera {

// Gives back what malloc holds free now, and has it keep what is freed from now
// on: blocks of up to 32 MiB, and 2 GiB at its end, for the whole process. A
// training frees its activations in every step, and glibc would return them to
// the kernel, which clears each page anew. glibc's own settings in the
// environment (MALLOC_..., GLIBC_TUNABLES) go before, and another malloc is
// left alone. Further calls do nothing. LOCAL.
void KeepFreedHeap();

}  // namespace tessera
#endif  // BASE_HEAP_H_
