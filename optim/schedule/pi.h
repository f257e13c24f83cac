#ifndef OPTIM_SCHEDULE_PI_H_
#define OPTIM_SCHEDULE_PI_H_

namespace tessera {

inline constexpr double kPi = 3.14159265358979323846;

}  // namespace tessera
#endif  // OPTIM_SCHEDULE_PI_H_
