// This is test_pch.h for files that use libtorch.
#ifndef TESTING_PCH_TORCH_TEST_PCH_H_
#define TESTING_PCH_TORCH_TEST_PCH_H_

#include "testing/pch/test_pch.h"
#include "third_party/libtorch/torch_pch.h"

#endif  // TESTING_PCH_TORCH_TEST_PCH_H_
