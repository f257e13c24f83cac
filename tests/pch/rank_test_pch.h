// This is torch_test_pch.h for files that train on ranks.
#ifndef TESTS_PCH_RANK_TEST_PCH_H_
#define TESTS_PCH_RANK_TEST_PCH_H_

#include "comm/world/world.h"
#include "engine/engine.h"
#include "testing/pch/torch_test_pch.h"
#include "tests/models/models.h"
#include "tests/support/rank_pool.h"
#include "tests/support/temp_folder.h"
#include "tests/support/trainee.h"
#include "tests/support/training.h"

#endif  // TESTS_PCH_RANK_TEST_PCH_H_
