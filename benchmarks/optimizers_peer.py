#!/usr/bin/env python3
"""AdamW of one tensor on the CPU: ours, torch's and DeepSpeed's, in turn.

    bazel build //benchmarks:libtessera_optimizers.so
    benchmarks/optimizers_peer.py bazel-bin/benchmarks/libtessera_optimizers.so \\
        --numel 67108864 --threads 2 --rounds 15

All work on the same buffers, round by round in turn, a STREAM triad (a = b + s *
c) too, in another order each time: what one leaves in the caches is the next
one's to write back. A step moves 28 bytes a parameter. Prints one JSON line:
medians, GB/s (28 bytes; the triad's 12 as STREAM counts them, and 16 with what
the processor reads before it writes), and ratios of a round's times to ours with
their median and its 95 % interval (peers_lib/ratios.py; from six rounds on). Needs
torch, and deepspeed unless --no-deepspeed.
"""

import argparse
import ctypes
import json
import os
import random
import statistics
import sys
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "peers_lib"))
sys.dont_write_bytecode = True

import ratios  # pylint: disable=wrong-import-position

LR, BETAS, EPS, DECAY = 1e-3, (0.9, 0.999), 1e-8, 0.01


def load(path):
    library = ctypes.CDLL(os.path.abspath(path))
    pointer, number = ctypes.c_void_p, ctypes.c_double
    library.tessera_adamw.argtypes = (
        [pointer] * 4
        + [ctypes.c_int, pointer, ctypes.c_int64]
        + [number] * 5
        + [ctypes.c_int64, ctypes.c_int]
    )
    library.tessera_triad.argtypes = [pointer] * 3 + [
        ctypes.c_float,
        ctypes.c_int64,
        ctypes.c_int,
    ]
    library.tessera_isa.restype = ctypes.c_char_p
    return library


def summary(values):
    low, high = ratios.median_interval(values)
    return {
        "median": round(statistics.median(values), 3),
        "interval": [round(low, 3), round(high, 3)] if len(values) >= 6 else None,
        "rounds": [round(value, 4) for value in values],
    }


def contestants(torch, library, options):
    master, exp_avg, exp_avg_sq, gradient = (
        torch.randn(options.numel) for _ in range(4)
    )
    exp_avg.mul_(0.1)
    exp_avg_sq.abs_().mul_(0.01)
    parameter = torch.nn.Parameter(master)
    parameter.grad = gradient

    def ours(step):
        library.tessera_adamw(
            master.data_ptr(), exp_avg.data_ptr(), exp_avg_sq.data_ptr(),
            gradient.data_ptr(), 0, None, options.numel, LR, *BETAS, EPS, DECAY,
            step, options.threads,
        )  # fmt: skip

    def optimizer(kind, step, **more):
        made = kind([parameter], lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY, **more)
        made.state[parameter] = {
            "step": step,
            "exp_avg": exp_avg,
            "exp_avg_sq": exp_avg_sq,
        }
        return made

    all_of_them = {"ours": ours}
    fused = optimizer(torch.optim.AdamW, torch.zeros(()), fused=True)
    all_of_them["torch"] = lambda step: fused.step()
    if not options.no_deepspeed:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        cpu_adam = optimizer(DeepSpeedCPUAdam, 0, adamw_mode=True)
        all_of_them["deepspeed"] = lambda step: cpu_adam.step()
    all_of_them["triad"] = lambda step: library.tessera_triad(
        master.data_ptr(), exp_avg.data_ptr(), gradient.data_ptr(), 0.5,
        options.numel, options.threads,
    )  # fmt: skip
    return all_of_them


def measure(all_of_them, rounds):
    seconds = {name: [] for name in all_of_them}
    step = 0
    order, shuffled = list(all_of_them), random.Random(1)
    for number in range(rounds + 1):
        shuffled.shuffle(order)
        for name in order:
            step += 1
            begin = time.perf_counter()
            all_of_them[name](step)
            if number > 0:  # the first is not measured
                seconds[name].append(time.perf_counter() - begin)
    return seconds


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("library")
    parser.add_argument("--numel", type=int, default=1 << 26)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--no-deepspeed", action="store_true")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    import torch

    torch.set_num_threads(options.threads)
    library = load(options.library)
    seconds = measure(contestants(torch, library, options), options.rounds)
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    bytes_of = {name: 12 if name == "triad" else 28 for name in seconds}
    rates = {n: bytes_of[n] * options.numel / t * 1e-9 for n, t in medians.items()}
    rates["triad_16"] = rates["triad"] * 16 / 12
    over = {
        name: summary([t / o for t, o in zip(times, seconds["ours"])])
        for name, times in seconds.items()
        if name not in ("ours", "triad")
    }
    for name, item in (("triad", 12), ("triad_16", 16)):
        over[name] = summary(
            [28 / o / (item / t) for t, o in zip(seconds["triad"], seconds["ours"])]
        )
    print(
        json.dumps(
            {
                "benchmark": "optimizers_peer",
                "numel": options.numel,
                "threads": options.threads,
                "rounds": options.rounds,
                "isa": library.tessera_isa().decode(),
                "median_ms": {n: round(t * 1e3, 3) for n, t in medians.items()},
                "ms": {
                    n: [round(t * 1e3, 3) for t in times]
                    for n, times in seconds.items()
                },
                "gb_per_s": {n: round(r, 2) for n, r in rates.items()},
                "rate_of_ours_over": over,
            }
        )
    )


if __name__ == "__main__":
    main()
