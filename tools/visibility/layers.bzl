"""The layers of tools/layers.txt, as Bazel sees them.

BUILD files cannot read a text file, so the table is here a second time;
//tools:layers_test compares the two.
"""

# A layer, and those whose headers it may include besides its own.
LAYERS = {
    "base": [],
    "config": ["base"],
    "comm": ["base"],
    "data": ["base"],
    "sharding": ["base", "comm"],
    "optim": ["base", "comm", "sharding"],
    "checkpoint": ["base", "config", "comm", "sharding"],
    "engine": ["base", "config", "comm", "data", "sharding", "optim", "checkpoint"],
    "verify": ["base", "config", "comm", "sharding", "engine"],
    "examples": ["base", "config", "comm", "data", "sharding", "optim", "checkpoint", "engine"],
    "benchmarks": ["base", "config", "comm", "data", "sharding", "optim", "checkpoint", "engine"],
    "tools": ["base", "config", "comm", "data", "sharding", "optim", "checkpoint", "engine"],
    "tests": ["base", "config", "comm", "data", "sharding", "optim", "checkpoint", "engine", "verify", "examples", "tools"],
}

def layer_groups():
    """Makes NAME_users for every layer: itself and those that may include it."""
    for layer in LAYERS:
        users = [other for other in LAYERS if layer in LAYERS[other]]
        native.package_group(
            name = layer + "_users",
            packages = ["//%s/..." % user for user in [layer] + users],
        )
