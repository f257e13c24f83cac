// The learning rate that a configuration means.
#ifndef ENGINE_BUILD_RATE_SETTINGS_H_
#define ENGINE_BUILD_RATE_SETTINGS_H_

#include <memory>

#include "optim/schedule/lr_schedule.h"

namespace tessera {

namespace proto {
class Config;
}

// What all rates of the configuration are multiplied with
// (learning_rate_scaling); 1 without. REQUIRES: resolved. LOCAL.
double RateFactorOf(const proto::Config& config);

// The scheduler, with its rates scaled so; null: there is none, or no
// optimizer. REQUIRES: resolved and runnable (config/config.h). LOCAL.
std::unique_ptr<LrSchedule> LrScheduleOf(const proto::Config& config);

}  // namespace tessera
#endif  // ENGINE_BUILD_RATE_SETTINGS_H_
