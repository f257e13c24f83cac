// Remainders: float32 masters kept as 16 bits beside a bfloat16 working copy.
//
//   bits of a master   [ 16 upper bits | 16 lower bits ]
//   working copy       upper bits, and 1 more where the lower ones are 0x8000
//                      or above
//   remainder          the lower bits, as a signed number
//
//   bits = (working << 16) + remainder
//
// So both together are the master, to the bit, in 4 bytes instead of 6. NaN is
// the exception: each becomes 0x7fc00000. Infinities stay, and so does what
// rounds to one.
//
// Note [Ties of remainders]
// The working copy is the master rounded to the nearest, as without remainders,
// except that a tie is rounded away from zero and not to even: 65,536 masters
// share a working value, and half to even would give some of them 65,537. One
// in 65,536 masters is a tie.
//
// Source: Transformer Engine's FusedAdam, store_param_remainders.
#ifndef OFFLOAD_REMAINDERS_H_
#define OFFLOAD_REMAINDERS_H_

#include "ATen/core/Tensor.h"

namespace tessera {

// The dtype of remainders, as a tensor holds them.
inline constexpr at::ScalarType kRemainderDtype = at::kShort;

// Returns `values`, [n] of any dtype, in bfloat16, rounded as working copies
// beside remainders are. LOCAL, ASYNC on devices, as all below.
at::Tensor RoundTiesAway(const at::Tensor& values);
// Sets `working` (bfloat16) and `remainders` to `masters`, of any dtype and
// device. [n] each.
void SplitMasters(const at::Tensor& masters, const at::Tensor& working,
                  const at::Tensor& remainders);
// Sets `masters` (float32) to the masters. [n] each.
void JoinMasters(const at::Tensor& working, const at::Tensor& remainders,
                 const at::Tensor& masters);

}  // namespace tessera
#endif  // OFFLOAD_REMAINDERS_H_
