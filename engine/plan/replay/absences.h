// Absences: tensors of a trace that an engine frees between forward and
// backward and makes again, although autograd would keep them.
//
//   casts of parameters   sharding/dispatch/saved_casts.h: gone after their
//                         last use in forward, made again at the first in
//                         backward, which uses the parameter
//   what a unit computes  where units are computed again: recomputation.h
#ifndef ENGINE_PLAN_REPLAY_ABSENCES_H_
#define ENGINE_PLAN_REPLAY_ABSENCES_H_

#include <cstdint>
#include <vector>

#include "sharding/trace/trace.h"

namespace tessera {

struct Absence {
  int32_t allocation = 0;
  int64_t from = 0;      // event before which it goes
  int64_t until = 0;     // event before which it is back; < 0: not again
  int32_t cast_of = -1;  // parameter that is used to make it again
};

// Finds the absences of casts of parameters for which `is_owned` (by number) is
// true, in no particular order.
std::vector<Absence> CastAbsences(const Trace& trace,
                                  const std::vector<bool>& is_owned);

}  // namespace tessera
#endif  // ENGINE_PLAN_REPLAY_ABSENCES_H_
