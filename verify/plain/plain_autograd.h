// libtorch's own autograd engine, for plain training that ours is compared
// with.
#ifndef VERIFY_PLAIN_PLAIN_AUTOGRAD_H_
#define VERIFY_PLAIN_PLAIN_AUTOGRAD_H_

#include "sharding/dispatch/saved_tensors.h"
#include "torch/csrc/autograd/engine.h"

namespace tessera {

// While it lives, the process has libtorch's own engine, and not the one that
// installed itself (sharding/dispatch/saved_tensors.h): what is computed is
// plain libtorch's. Not to be nested, not to be used while another thread
// computes.
//
// Why libtorch's engine is given threads first: it starts those of devices once
// per process, for the engine that runs first, and one without them ends at an
// internal assertion at the first backward on a device. Ours, which may be that
// first one, starts its own where it comes later.
class PlainAutograd {
 public:
  PlainAutograd() {
    StartDeviceThreads();
    // Not for the first time within, where it would be undone.
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
  // Of libtorch's engine, unless it has them.
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
