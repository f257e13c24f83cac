// Runs every parser of what comes from other processes on thousands of inputs:
// its corpus, each prefix of it, mutations of it, and what libFuzzer has found
// (corpus/TARGET/). None may end the process, or leave anything behind.
#include "tests/fuzz/fuzz.h"

#include <dirent.h>
#include <signal.h>
#include <sys/resource.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <new>
#include <string>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"

#ifndef __has_feature
#define __has_feature(feature) 0
#endif
#if !__has_feature(address_sanitizer) && !__has_feature(thread_sanitizer)
#define TESSERA_SEES_ALLOCATIONS 1
#endif

namespace {
std::atomic<size_t> largest_allocation{0};
}  // namespace

#ifdef TESSERA_SEES_ALLOCATIONS
// All of the program's, libraries included: memory that is asked for and never
// touched is no part of what getrusage tells.
void* operator new(size_t bytes) {
  size_t largest = largest_allocation;
  while (bytes > largest &&
         !largest_allocation.compare_exchange_weak(largest, bytes)) {
  }
  void* const memory = std::malloc(bytes);
  if (memory == nullptr) std::abort();
  return memory;
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { std::free(memory); }
#endif

namespace tessera {
namespace {

// Bytes for all the inputs of a target.
constexpr int64_t kMostBytes = 16 << 20;

uint64_t Seed() {
  const char* const seed = std::getenv("TESSERA_TEST_SEED");
  return seed == nullptr ? 1 : std::strtoull(seed, nullptr, 10);
}

int Entries(const char* folder) {
  int count = 0;
  DIR* const dir = opendir(folder);
  while (dir != nullptr && readdir(dir) != nullptr) ++count;
  closedir(dir);
  return count;
}

// AddressSanitizer keeps for a while what is freed.
int64_t PeakBytes() {
#if __has_feature(address_sanitizer)
  return 0;
#endif
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return usage.ru_maxrss * int64_t{1024};
}

// The signal handler reads what runs now.
const std::string* running = nullptr;

// The input that ended the process, since nothing else says.
void Tell(int signal) {
  constexpr char kDigits[] = "0123456789abcdef";
  constexpr char kWords[] = "\ninput that ended the process: ";
  (void)!write(STDERR_FILENO, kWords, sizeof(kWords) - 1);
  for (const char byte : *running) {
    const char pair[] = {kDigits[(byte >> 4) & 15], kDigits[byte & 15]};
    (void)!write(STDERR_FILENO, pair, sizeof(pair));
  }
  (void)!write(STDERR_FILENO, "\n", 1);
  raise(signal);
}

void TellOfSignals() {
  struct sigaction action {};
  action.sa_handler = Tell;
  action.sa_flags = SA_RESETHAND;
  for (const int signal : {SIGABRT, SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGPIPE}) {
    sigaction(signal, &action, nullptr);
  }
}

std::vector<std::string> FoundInputs(const std::string& target) {
  std::vector<std::string> inputs;
  std::error_code none;
  for (const auto& entry : std::filesystem::directory_iterator(
           absl::StrCat("tests/fuzz/corpus/", target), none)) {
    std::ifstream file(entry.path(), std::ios::binary);
    inputs.emplace_back(std::istreambuf_iterator<char>(file),
                        std::istreambuf_iterator<char>());
  }
  return inputs;
}

class Parser : public ::testing::TestWithParam<FuzzTarget> {};

TEST_P(Parser, SurvivesAnyInput) {
  const FuzzTarget& target = GetParam();
  SCOPED_TRACE(absl::StrCat("TESSERA_TEST_SEED=", Seed()));
  TellOfSignals();
  const auto run = [&](const std::string& input) {
    running = &input;
    target.run(input);
  };
  ASSERT_FALSE(target.corpus.empty());
  largest_allocation = 0;
  for (const std::string& input : target.corpus) run(input);
  for (const std::string& input : FoundInputs(target.name)) run(input);
  const int descriptors = Entries("/proc/self/fd");
  const int threads = Entries("/proc/self/task");
  const int64_t peak = PeakBytes();
  for (const std::string& input : target.corpus) {
    for (size_t bytes = 0; bytes < input.size(); ++bytes) {
      run(input.substr(0, bytes));
    }
  }
  FuzzInputs inputs(target.corpus, Seed());
  for (int i = 0; i < target.rounds; ++i) run(inputs.Next());
  EXPECT_EQ(Entries("/proc/self/fd"), descriptors);
  EXPECT_EQ(Entries("/proc/self/task"), threads);
  EXPECT_LT(PeakBytes() - peak, kMostBytes);
  EXPECT_LT(largest_allocation, static_cast<size_t>(kMostBytes));
}

INSTANTIATE_TEST_SUITE_P(All, Parser, ::testing::ValuesIn(AllFuzzTargets()),
                         [](const ::testing::TestParamInfo<FuzzTarget>& info) {
                           return info.param.name;
                         });

}  // namespace
}  // namespace tessera
