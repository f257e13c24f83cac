// `tessera plan` is a separate program: it is the only command that needs
// libtorch.
#include <iostream>
#include <string>
#include <vector>

#include "tools/plan_command.h"
#include "tools/written.h"

int main(int argc, char** argv) {
  return tessera::Written(
      tessera::RunPlanCommand({argv + 1, argv + argc}, &std::cout, &std::cerr));
}
