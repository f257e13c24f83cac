// Workers are threads that wait for parts of a range, for programs that measure
// a loop in a given number of threads. Triad is the loop that such programs are
// measured beside.
#ifndef BENCHMARKS_WORKERS_H_
#define BENCHMARKS_WORKERS_H_

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace tessera {

// STREAM's triad, a[i] = b[i] + s * c[i], shows what the memory gives a plain
// loop. An element takes three transfers of the program, 12 bytes; four, 16
// bytes, with the lines of `a` that the processor reads before it writes them.
inline void Triad(float* a, const float* b, const float* c, float s,
                  int64_t numel) {
#pragma clang loop vectorize(assume_safety)
  for (int64_t i = 0; i < numel; ++i) a[i] = b[i] + s * c[i];
}

class Workers {
 public:
  using Loop = std::function<void(int64_t begin, int64_t end)>;

  explicit Workers(int threads) {
    for (int i = 1; i < threads; ++i) {
      threads_.emplace_back([this, i] { Work(i); });
    }
  }
  ~Workers() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      loop_ = nullptr;
      ++round_;
    }
    changed_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }
  Workers(const Workers&) = delete;
  Workers& operator=(const Workers&) = delete;

  int count() const { return static_cast<int>(threads_.size()) + 1; }

  // Calls `loop` once in each thread, this one included, with equal parts of
  // [0, numel); returns when all are done.
  void Run(int64_t numel, const Loop& loop) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      loop_ = &loop;
      numel_ = numel;
      running_ = static_cast<int>(threads_.size());
      ++round_;
    }
    changed_.notify_all();
    RunPart(loop, numel, 0);
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [this] { return running_ == 0; });
  }

 private:
  void RunPart(const Loop& loop, int64_t numel, int i) const {
    constexpr int64_t kLine = 16;  // floats
    const auto edge = [&](int part) {
      return part == count() ? numel : numel / count() * part / kLine * kLine;
    };
    loop(edge(i), edge(i + 1));
  }
  void Work(int i) {
    std::unique_lock<std::mutex> lock(mutex_);
    for (int64_t seen = 0;;) {
      changed_.wait(lock, [&] { return round_ != seen; });
      seen = round_;
      if (loop_ == nullptr) return;
      const Loop& loop = *loop_;
      const int64_t numel = numel_;
      lock.unlock();
      RunPart(loop, numel, i);
      lock.lock();
      if (--running_ == 0) changed_.notify_all();
    }
  }

  std::vector<std::thread> threads_;
  std::mutex mutex_;
  std::condition_variable changed_;
  const Loop* loop_ = nullptr;  // null: the end
  int64_t numel_ = 0, round_ = 0;
  int running_ = 0;
};

}  // namespace tessera
#endif  // BENCHMARKS_WORKERS_H_
