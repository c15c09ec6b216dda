// Threads that stay: under ThreadSanitizer it takes longer to make 32 of them than to run a call on them. What a
// caller did before `start` they see, and what they did it sees after `wait`, as if they were made and joined.
#pragma once

#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

class Threads {
 public:
  explicit Threads(int number) {
    for (int index = 0; index < number; ++index) {
      threads_.emplace_back([this, index] { serve(index); });
    }
  }
  ~Threads() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      ending_ = true;
      changed_.notify_all();
    }
    for (std::thread& thread : threads_) thread.join();
  }
  // body(index) on each; `body` has to live until `wait` returns.
  void start(const std::function<void(int)>& body) {
    std::lock_guard<std::mutex> lock(mutex_);
    body_ = &body;
    num_left_ = int(threads_.size());
    ++generation_;
    changed_.notify_all();
  }
  void wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    all_done_.wait(lock, [&] { return num_left_ == 0; });
  }
  void run(const std::function<void(int)>& body) {
    start(body);
    wait();
  }

 private:
  void serve(int index) {
    for (int seen = 0;;) {
      const std::function<void(int)>* body;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        changed_.wait(lock, [&] { return ending_ || generation_ != seen; });
        if (ending_) return;
        seen = generation_;
        body = body_;
      }
      (*body)(index);
      std::lock_guard<std::mutex> lock(mutex_);
      if (--num_left_ == 0) all_done_.notify_one();
    }
  }

  std::vector<std::thread> threads_;
  std::mutex mutex_;
  std::condition_variable changed_, all_done_;
  const std::function<void(int)>* body_ = nullptr;
  int generation_ = 0, num_left_ = 0;
  bool ending_ = false;
};
