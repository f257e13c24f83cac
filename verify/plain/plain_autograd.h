// Uses libtorch's own autograd engine, for plain training that ours is compared
// with.
#ifndef VERIFY_PLAIN_PLAIN_AUTOGRAD_H_
#define VERIFY_PLAIN_PLAIN_AUTOGRAD_H_

#include "sharding/dispatch/saved_tensors.h"
#include "torch/csrc/autograd/engine.h"

namespace tessera {

// While it lives, the process has libtorch's own engine instead of the one that
// installed itself (sharding/dispatch/saved_tensors.h), so what is computed is
// plain libtorch's. Do not nest it, and do not use it while another thread
// computes.
//
// libtorch's engine gets its threads first. It starts those of devices once per
// process, for the engine that runs first, and an engine without them ends at
// an internal assertion at the first backward on a device. Ours may be that
// first one; it starts its own threads where it comes later.
class PlainAutograd {
 public:
  PlainAutograd() {
    StartDeviceThreads();
    // Installs the hooks now: a first time within the scope would be undone.
    InstallSavedTensorHooks();
    Ours() = &torch::autograd::Engine::get_default_engine();
    torch::autograd::set_default_engine_stub(
        &torch::autograd::Engine::get_base_engine);
  }
  ~PlainAutograd() {
    torch::autograd::set_default_engine_stub(
        []() -> torch::autograd::Engine& { return *Ours(); });
  }
  PlainAutograd(const PlainAutograd&) = delete;
  PlainAutograd& operator=(const PlainAutograd&) = delete;

 private:
  // Starts the threads of libtorch's engine, unless it has them.
  static void StartDeviceThreads() {
    struct Members : torch::autograd::Engine {
      static void Start(torch::autograd::Engine& engine) {
        engine.initialize_device_threads_pool();
        if (engine.*(&Members::thread_pool_shared_) == nullptr) {
          (engine.*(&Members::start_device_threads))();
        }
      }
    };
    Members::Start(torch::autograd::Engine::get_base_engine());
  }
  static torch::autograd::Engine*& Ours() {
    static torch::autograd::Engine* engine = nullptr;
    return engine;
  }
};

}  // namespace tessera
#endif  // VERIFY_PLAIN_PLAIN_AUTOGRAD_H_
