// What the sections optimizer.params and optimizer.param_groups[].params say of
// the options of optim/algorithms: fields have the options' names, except that
// betas are beta1 and beta2.
#ifndef CONFIG_OPTIONS_OPTION_VALUES_H_
#define CONFIG_OPTIONS_OPTION_VALUES_H_

#include "google/protobuf/message.h"
#include "optim/algorithms/optimizer_options.h"
#include "optim/algorithms/option_names.h"

namespace tessera {

// All numbers and flags that are set.
OptionValues OptionValuesOf(const google::protobuf::Message& params);

// Gives `options` those of its algorithm that are set; with `defaults` the
// others their defaults. In range or not.
void ReadOptions(const google::protobuf::Message& params, bool defaults,
                 OptimizerOptions* options);

}  // namespace tessera
#endif  // CONFIG_OPTIONS_OPTION_VALUES_H_
