// The learning rate that a configuration means.
#ifndef ENGINE_BUILD_RATE_SETTINGS_H_
#define ENGINE_BUILD_RATE_SETTINGS_H_

#include <memory>

#include "optim/schedule/lr_schedule.h"

namespace tessera {

namespace proto {
class Config;
}

// Returns the factor of all rates of the configuration (learning_rate_scaling);
// 1 without. REQUIRES: resolved. LOCAL.
double RateFactorOf(const proto::Config& config);

// Makes the scheduler, with its rates multiplied by RateFactorOf; null: there
// is none, or no optimizer. REQUIRES: resolved and runnable (config/config.h).
// LOCAL.
std::unique_ptr<LrSchedule> LrScheduleOf(const proto::Config& config);

}  // namespace tessera
#endif  // ENGINE_BUILD_RATE_SETTINGS_H_
