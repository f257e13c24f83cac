"""The layers of tools/layers.txt, as Bazel sees them.

BUILD files cannot read a text file, so the table is here a second time;
//tools:layers_test compares the two.
"""

# A folder, and those whose headers it may include besides its own; FOLDER/... is
# a folder and all of its rooms.
LAYERS = {
    "testing/device": [],
    "base": [],
    "testing/pch": ["base"],
    "base/command": ["base"],
    "base/memory": ["base"],
    "base/system": ["base"],
    "base/disk": ["base", "base/system"],
    "testing/disk": ["base", "base/disk"],
    "base/thread": ["base", "base/system"],
    "base/trace": ["base", "base/thread"],
    "base/page": ["base"],
    "base/step_memory": ["base", "base/memory", "base/page", "base/thread", "base/trace"],
    "base/torch": ["base", "base/memory", "base/step_memory"],
    "base/above": ["base"],
    "base/stream": ["base"],
    "base/layout": ["base", "base/memory", "base/torch", "base/stream"],
    "config/reader": ["base/..."],
    "optim/formulas": ["base/..."],
    "optim/algorithms": ["base/...", "optim/formulas"],
    "config/options": ["base/...", "optim/algorithms"],
    "config/training": ["base/..."],
    "config": ["base/...", "config/options", "config/reader", "config/training", "optim/algorithms"],
    "report": ["base/...", "config/reader"],
    "comm": ["base/..."],
    "comm/launch": ["base/..."],
    "comm/connect": ["base/..."],
    "comm/rendezvous": ["base/...", "comm", "comm/connect"],
    "comm/reduce": ["base/..."],
    "comm/record": ["base/...", "comm"],
    "comm/watch": ["base/...", "comm", "comm/launch", "comm/record", "comm/connect", "comm/rendezvous"],
    "comm/mesh": ["base/...", "comm"],
    "comm/group": ["base/...", "comm", "comm/reduce", "comm/record", "comm/rendezvous", "comm/watch"],
    "comm/shm": ["base/...", "comm", "comm/connect", "comm/reduce", "comm/watch"],
    "comm/gloo": ["base/...", "comm", "comm/connect", "comm/reduce"],
    "comm/device": ["base/...", "comm", "comm/reduce", "comm/rendezvous", "comm/watch"],
    "comm/nccl": ["base/...", "comm", "comm/device", "comm/group", "comm/reduce", "comm/watch"],
    "comm/cuda_ipc": ["base/...", "comm", "comm/device"],
    "comm/hierarchical": ["base/...", "comm", "comm/reduce", "comm/shm", "comm/gloo"],
    "comm/serve": ["base/...", "comm", "comm/connect", "comm/rendezvous", "comm/record", "comm/watch", "comm/group"],
    "comm/world": ["base/...", "comm/..."],
    "data": ["base/..."],
    "monitor": ["base/..."],
    "data/text": ["base/...", "data"],
    "data/images": ["base/...", "data"],
    "data/tar": ["base/...", "data"],
    "data/sentencepiece": ["base/...", "data", "data/text"],
    "loader": ["base/...", "comm", "data"],
    "offload/disk": ["base/...", "testing/disk"],
    "sharding/partition": ["base/..."],
    "offload": ["base/...", "comm", "offload/disk"],
    "sharding/construct": ["base/...", "comm", "sharding/partition"],
    "sharding/copy": ["base/...", "comm", "comm/serve", "sharding/partition", "offload", "offload/disk"],
    "sharding/flat": ["base/...", "comm", "sharding/partition", "sharding/construct", "sharding/copy", "offload", "offload/disk"],
    "sharding/dispatch": ["base/...", "comm", "sharding/construct", "sharding/flat"],
    "sharding/recompute": ["base/...", "comm", "sharding/construct", "sharding/flat", "sharding/dispatch", "offload", "offload/disk"],
    "sharding/recompute/checkpointed": ["base/...", "comm", "sharding/construct", "sharding/flat", "sharding/dispatch", "sharding/recompute"],
    "sharding/trace/operators": ["base/..."],
    "sharding/trace": ["base/...", "sharding/dispatch", "sharding/trace/operators"],
    "nn": ["base/...", "comm", "comm/world", "sharding/dispatch", "sharding/flat"],
    "parallel/tensor": ["base/...", "comm"],
    "parallel/plan": ["base/...", "comm", "parallel/tensor", "sharding/partition", "sharding/trace"],
    "parallel/pipeline": ["base/...", "comm", "parallel/plan", "parallel/tensor", "sharding/dispatch", "sharding/trace", "sharding/trace/operators"],
    "sharding/gradient": ["base/...", "comm", "sharding/copy", "sharding/flat", "sharding/dispatch", "offload", "offload/disk"],
    "optim/norm": ["base/...", "comm"],
    "optim/kernels": ["base/...", "optim/algorithms", "optim/formulas"],
    "optim/custom": ["base/...", "optim/algorithms", "optim/kernels"],
    "optim/matrix": ["base/..."],
    "optim/schedule": [],
    "optim/gradients": ["base/...", "comm", "optim/norm", "sharding/flat", "sharding/gradient", "offload", "offload/disk"],
    "optim/factored": ["base/...", "comm", "optim/algorithms", "optim/formulas", "optim/kernels", "sharding/flat", "offload", "offload/disk"],
    "optim/states": ["base/...", "comm", "optim/algorithms", "optim/custom", "optim/factored", "optim/formulas", "optim/kernels", "sharding/flat", "offload", "offload/disk"],
    "optim": ["base/...", "comm", "optim/algorithms", "optim/custom", "optim/factored", "optim/formulas", "optim/gradients", "optim/kernels", "optim/matrix", "optim/norm", "optim/schedule", "optim/states", "sharding/flat", "sharding/gradient", "offload", "offload/disk"],
    "optim/cuda": ["base/...", "optim", "optim/algorithms", "optim/formulas", "optim/kernels", "optim/norm"],
    "checkpoint/disk": ["base/...", "testing/disk"],
    "checkpoint/format": ["base/...", "checkpoint/disk", "testing/disk"],
    "checkpoint/exchange": ["base/...", "checkpoint/disk", "checkpoint/format", "config/reader", "testing/disk"],
    "checkpoint": ["base/...", "checkpoint/disk", "checkpoint/format", "checkpoint/exchange", "config/reader", "comm", "comm/rendezvous", "comm/group", "sharding/flat"],
    "checkpoint/save": ["base/...", "checkpoint", "checkpoint/disk", "checkpoint/format", "comm", "comm/connect", "comm/serve", "offload", "offload/disk"],
    "engine/api": ["base/...", "config", "sharding/recompute", "optim/custom", "optim/gradients", "checkpoint/exchange", "optim/algorithms"],
    "engine/build": ["base/...", "config", "comm", "parallel/tensor", "sharding/...", "optim", "optim/custom", "optim/kernels", "optim/schedule", "engine/api", "offload/...", "optim/algorithms", "optim/states", "config/options"],
    "engine/divide": ["base/...", "config", "comm", "parallel/pipeline", "parallel/plan", "parallel/tensor", "sharding/...", "optim", "optim/custom", "optim/kernels", "optim/schedule", "engine/api", "engine/build", "offload/...", "optim/algorithms", "optim/states", "config/options"],
    "engine/plan/replay": ["base/...", "config", "comm", "sharding/...", "optim", "optim/kernels", "engine/api", "engine/build", "offload/..."],
    "engine/plan": ["base/...", "config", "comm", "sharding/...", "optim", "optim/custom", "optim/kernels", "engine/api", "engine/build", "engine/plan/replay", "offload/...", "optim/states", "optim/algorithms"],
    "engine/model": ["base/...", "comm", "comm/mesh", "parallel/tensor", "sharding/...", "optim", "optim/kernels", "optim/schedule", "engine/api", "engine/build", "offload/...", "optim/algorithms", "optim/states"],
    "engine/observe": ["base/...", "config", "config/reader", "comm", "monitor", "sharding/...", "optim", "optim/gradients", "engine/api", "engine/build", "engine/model", "engine/plan", "offload/..."],
    "engine/program": ["base/...", "config", "comm", "comm/world"],
    "engine/checkpoint": ["base/...", "config", "comm", "parallel/tensor", "sharding/...", "optim", "optim/custom", "optim/kernels", "optim/schedule", "checkpoint/...", "engine/api", "engine/build", "engine/model", "offload/...", "optim/algorithms", "optim/states"],
    "engine/values": ["base/...", "comm", "parallel/tensor", "sharding/...", "optim", "optim/kernels", "engine/api", "engine/build", "engine/model", "engine/checkpoint", "offload/...", "optim/algorithms", "optim/states"],
    "engine/train": ["base/...", "config", "comm", "monitor", "parallel/pipeline", "sharding/...", "optim/...", "engine/api", "engine/build", "engine/model", "engine/plan", "engine/observe", "checkpoint/exchange", "offload/..."],
    "engine/run": ["base/...", "checkpoint", "checkpoint/disk", "checkpoint/format", "comm"],
    "engine": ["base/...", "config", "comm", "comm/world", "data/...", "monitor", "engine/...", "sharding/...", "optim/...", "checkpoint/...", "offload/..."],
    "evaluation": ["base/...", "comm", "engine", "engine/observe", "optim/norm"],
    "verify/factored": [],
    "verify/plain": ["base/above", "sharding/dispatch"],
    "verify/parts": ["base/...", "comm", "parallel/tensor"],
    "verify": ["base/...", "verify/factored", "verify/plain", "verify/parts", "config", "comm", "comm/world", "parallel/tensor", "sharding/...", "engine/...", "offload/...", "nn"],
    "tessera": ["base/...", "config", "comm", "comm/world", "data/...", "monitor", "loader", "parallel/tensor", "sharding/...", "optim/...", "checkpoint/...", "engine/...", "evaluation", "verify", "nn"],
    "examples": ["tessera", "base/...", "config", "config/reader", "comm", "comm/world", "data/...", "monitor", "loader", "sharding/...", "optim", "optim/kernels", "checkpoint/...", "engine/...", "evaluation", "offload/...", "nn"],
    "benchmarks/gpt": ["base/...", "verify/plain"],
    "benchmarks": ["tessera", "testing/device", "benchmarks/gpt", "base/...", "config/...", "comm/...", "data/...", "monitor", "loader", "sharding/...", "optim", "optim/algorithms", "optim/kernels", "optim/matrix", "checkpoint/...", "engine/...", "verify/...", "offload/...", "nn", "parallel/..."],
    "tools": ["base/...", "report", "config/...", "comm/...", "data/...", "monitor", "loader", "sharding/...", "optim", "optim/kernels", "checkpoint/...", "engine/...", "examples", "offload/..."],
    "tests": ["tessera", "testing/...", "base/...", "report", "config/...", "comm/...", "data/...", "monitor", "loader", "sharding/...", "optim/...", "checkpoint/...", "engine/...", "evaluation", "verify/...", "examples", "tools", "offload/...", "nn", "parallel/..."],
    "bundle": ["tessera", "testing/...", "base/...", "report", "config/...", "comm/...", "data/...", "monitor", "loader", "sharding/...", "optim/...", "checkpoint/...", "engine/...", "evaluation", "verify/...", "examples", "benchmarks", "tools", "tests", "offload/..."],
    "dist": ["tessera", "base/...", "data/...", "monitor", "loader", "engine/...", "evaluation", "verify/...", "tools", "bundle", "examples", "nn"],
}

def _allows(words, layer):
    for word in words:
        if word == layer:
            return True
        if word.endswith("/...") and (layer + "/").startswith(word[:-3]):
            return True
    return False

def layer_groups():
    """Makes NAME_users for every folder: itself and those that may include it.

    The "/" in a folder's name become "_".
    """
    for layer in LAYERS:
        users = [other for other in LAYERS if _allows(LAYERS[other], layer)]
        native.package_group(
            name = layer.replace("/", "_") + "_users",
            packages = ["//%s/..." % user for user in [layer] + users],
        )
