#include "examples/vision/torch_arguments.h"

#include <string>
#include <vector>

#include "gmock/gmock.h"

namespace {

using ::testing::ElementsAre;

std::vector<std::string> Renamed(std::vector<std::string> words) {
  std::vector<char*> argv;
  for (std::string& word : words) argv.push_back(word.data());
  const TorchArguments arguments(static_cast<int>(argv.size()), argv.data());
  EXPECT_EQ(arguments.argv[arguments.argc], nullptr);
  return {arguments.argv, arguments.argv + arguments.argc};
}

TEST(TorchArgumentsTest, NamesAreInitsAndValuesStay) {
  EXPECT_THAT(
      Renamed({"my--dist-url", "--dist-url=tcp://my-host:1", "--world-size",
               "8", "--rank=3", "--batch-size=2-3", "a-b", "--resume"}),
      ElementsAre("my--dist-url", "--rendezvous=tcp://my-host:1",
                  "--world_size", "8", "--rank=3", "--batch_size=2-3", "a-b",
                  "--resume"));
  EXPECT_THAT(Renamed({"p", "--dist-url", "file:///a-b"}),
              ElementsAre("p", "--rendezvous", "file:///a-b"));
}

}  // namespace
