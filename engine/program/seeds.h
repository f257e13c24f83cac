// The second half of SeedAll (engine/program/start.h).
#ifndef ENGINE_PROGRAM_SEEDS_H_
#define ENGINE_PROGRAM_SEEDS_H_

namespace tessera {

// Gives this rank the seed that SeedAll has left for it, the same to each
// `alike` neighbours: the ranks of a tensor-parallel group draw the same
// numbers. So do those `stage_ranks` apart, of a pipeline; 0: there is none.
// Does nothing if SeedAll was not called since the last time.
// Engine::Create calls it when it has made an engine. LOCAL.
void SeedThisRank(int alike, int stage_ranks);

}  // namespace tessera
#endif  // ENGINE_PROGRAM_SEEDS_H_
