// The heap of the process, malloc's.
#ifndef BASE_MEMORY_HEAP_H_
#define BASE_MEMORY_HEAP_H_

namespace tessera {

// What malloc does with what is freed, for the whole process, instead of what
// was set with mallopt. glibc's settings in the environment (MALLOC_...,
// GLIBC_TUNABLES) go before, and another malloc is left alone. LOCAL.

// Gives back what malloc holds free now, and has it return what is freed from
// now on, until KeepFreedHeap: blocks of 128 KiB or more for which it has no
// room are mapped by themselves. glibc alone learns to keep blocks of any size
// that was freed once: what a first step needs beyond those after it would stay
// for good. Further calls, and those after KeepFreedHeap, do nothing.
void ReturnFreedHeap();

// Gives back what malloc holds free now, and has it keep what is freed from now
// on: blocks of up to 32 MiB, and 2 GiB at its end. A training frees its
// activations in every step, and glibc would return them to the kernel, which
// clears each page anew. Further calls do nothing.
void KeepFreedHeap();

}  // namespace tessera
#endif  // BASE_MEMORY_HEAP_H_
