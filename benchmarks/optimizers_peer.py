#!/usr/bin/env python3
"""Steps of one tensor on the CPU: ours, torch's fused and DeepSpeed's, in turn.

    bazel build //benchmarks:libtessera_optimizers.so
    benchmarks/optimizers_peer.py bazel-bin/benchmarks/libtessera_optimizers.so \\
        --numel 67108864 --threads 2 --rounds 15

AdamW, Adam (L2), SGD (momentum), Adagrad and Lion, of those who have them: torch
has no Lion, DeepSpeed no SGD. First all of one algorithm make three steps of the
same values, which must agree. Then all work on the same buffers, round by round
in turn, a STREAM triad (a = b + s * c) too, in another order each time: what one
leaves in the caches is the next one's to write back. A step of AdamW or Adam
moves 28 bytes a parameter, of the others 20.

Prints a table, and one JSON line: medians, GB/s (the triad's 12 bytes as STREAM
counts them, and 16 with what the processor reads before it writes), and ratios
of a round's times, theirs over ours of the same algorithm (of the triad: of
rates): their median, its 95 % interval (peers_lib/ratios.py; from six rounds
on), the least and the largest. Needs torch, and deepspeed unless --no-deepspeed,
which compiles its operators at first use.
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

# Idle threads of one runtime spin for a while, on the processors of the next
# one's turn: measured with two of two, that took a third of ours.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

LR, EPS, DECAY, MOMENTUM = 1e-3, 1e-8, 0.01, 0.9
BETAS = {"lion": (0.9, 0.99)}
USUAL_BETAS = (0.9, 0.999)
# Of each algorithm the states, in our order, by the names they have in
# optimizers of torch's kind.
STATES = {
    "adamw": ("exp_avg", "exp_avg_sq"),
    "adam": ("exp_avg", "exp_avg_sq"),
    "sgd": ("momentum_buffer",),
    "adagrad": ("sum",),
    "lion": ("exp_avg",),
}
# What a step reads and writes of a parameter.
BYTES = {name: 12 + 8 * len(states) for name, states in STATES.items()}
CHECKED = 4096  # DeepSpeed writes over gradients that fill no vector
STEPS = 3
DONE = 1  # steps before the first one: SGD begins in another way


def load(path):
    library = ctypes.CDLL(os.path.abspath(path))
    pointer, number = ctypes.c_void_p, ctypes.c_double
    library.tessera_step.argtypes = (
        [ctypes.c_char_p, pointer, ctypes.POINTER(pointer), pointer, ctypes.c_int64]
        + [number] * 6
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
        "least": round(min(values), 3),
        "largest": round(max(values), 3),
        "rounds": [round(value, 4) for value in values],
    }


class Buffers:
    """What all work on: masters, gradient, and states, the first ones signed
    and the second ones not."""

    def __init__(self, torch, numel):
        torch.manual_seed(0)
        self.parameter = torch.nn.Parameter(torch.randn(numel))
        self.parameter.grad = torch.randn(numel)
        self.signed = torch.randn(numel).mul_(0.1)
        self.positive = torch.rand(numel).mul_(0.01)

    @property
    def all(self):
        return (self.parameter.data, self.signed, self.positive)

    def states(self, algorithm):
        if algorithm == "adagrad":
            return (self.positive,)
        return (self.signed, self.positive)[: len(STATES[algorithm])]


def ours(library, algorithm, buffers, threads):
    states = buffers.states(algorithm)
    pointers = (ctypes.c_void_p * 2)(*[state.data_ptr() for state in states])
    master, gradient = buffers.parameter.data, buffers.parameter.grad
    betas = BETAS.get(algorithm, USUAL_BETAS)

    def step(number):
        unknown = library.tessera_step(
            algorithm.encode(), master.data_ptr(), pointers, gradient.data_ptr(),
            master.numel(), LR, *betas, MOMENTUM, EPS, DECAY, number, threads,
        )  # fmt: skip
        if unknown:
            raise ValueError(algorithm)

    return step


def of_torch(torch, algorithm, buffers):
    """torch's fused step, or None."""
    optim = torch.optim
    common = {"lr": LR, "weight_decay": DECAY, "fused": True}
    adam = {"betas": USUAL_BETAS, "eps": EPS, **common}
    makers = {
        "adamw": lambda p: optim.AdamW(p, **adam),
        "adam": lambda p: optim.Adam(p, **adam),
        "sgd": lambda p: optim.SGD(p, momentum=MOMENTUM, **common),
        "adagrad": lambda p: optim.Adagrad(p, eps=EPS, **common),
    }
    if algorithm not in makers:
        return None
    optimizer = makers[algorithm]([buffers.parameter])
    state = dict(zip(STATES[algorithm], buffers.states(algorithm)))
    if algorithm != "sgd":
        state["step"] = torch.full((), float(DONE))
    optimizer.state[buffers.parameter] = state
    return lambda number: optimizer.step()


def of_deepspeed(algorithm, buffers):
    """DeepSpeed's step, or None."""
    from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
    from deepspeed.ops.adam import DeepSpeedCPUAdam
    from deepspeed.ops.lion import DeepSpeedCPULion

    common = {"lr": LR, "weight_decay": DECAY}
    adam = {"betas": USUAL_BETAS, "eps": EPS, **common}
    makers = {
        "adamw": lambda p: DeepSpeedCPUAdam(p, adamw_mode=True, **adam),
        "adam": lambda p: DeepSpeedCPUAdam(p, adamw_mode=False, **adam),
        "adagrad": lambda p: DeepSpeedCPUAdagrad(p, eps=EPS, **common),
        "lion": lambda p: DeepSpeedCPULion(p, betas=BETAS["lion"], **common),
    }
    if algorithm not in makers:
        return None
    optimizer = makers[algorithm]([buffers.parameter])
    names = ("exp_avg_sq",) if algorithm == "adagrad" else STATES[algorithm]
    state = dict(zip(names, buffers.states(algorithm)))
    optimizer.state[buffers.parameter] = {"step": DONE, **state}
    return lambda number: optimizer.step()


def contestants(torch, library, options, algorithm, buffers):
    """{who: step(number)}, ours first."""
    steps = {"ours": ours(library, algorithm, buffers, options.threads)}
    steps["torch"] = of_torch(torch, algorithm, buffers)
    if not options.no_deepspeed:
        steps["deepspeed"] = of_deepspeed(algorithm, buffers)
    return {who: step for who, step in steps.items() if step is not None}


def check(torch, library, options, algorithm):
    """A few steps of the same values are the same, up to how each rounds."""
    buffers = Buffers(torch, CHECKED)
    before = [value.clone() for value in buffers.all]
    results = {}
    for who, step in contestants(torch, library, options, algorithm, buffers).items():
        for value, old in zip(buffers.all, before):
            value.copy_(old)
        for number in range(DONE + 1, DONE + STEPS + 1):
            step(number)
        results[who] = [value.clone() for value in buffers.all]
    for who, values in results.items():
        for name, value, expected in zip(
            ("masters", "first states", "second states"), values, results["ours"]
        ):
            worst = (value - expected).abs().max().item()
            if not worst <= 1e-5:
                raise SystemExit(
                    f"optimizers_peer: {algorithm}: {name} of {who} are {worst:.3g} "
                    f"from ours after {STEPS} steps"
                )


def measure(all_of_them, rounds):
    seconds = {name: [] for name in all_of_them}
    order, shuffled = list(all_of_them), random.Random(1)
    for number in range(rounds + 1):
        shuffled.shuffle(order)
        for name in order:
            begin = time.perf_counter()
            all_of_them[name](DONE + 1 + number)
            if number > 0:  # the first is not measured
                seconds[name].append(time.perf_counter() - begin)
    return seconds


def compare(seconds):
    """{algorithm: {who or triad: summary}} and {name: bytes an element}."""
    over, bytes_of = {}, {"triad": 12}
    for name, times in seconds.items():
        if name == "triad":
            continue
        algorithm, who = name.split(" ")
        mine = seconds[f"{algorithm} ours"]
        bytes_of[name] = BYTES[algorithm]
        if who != "ours":
            over[algorithm][who] = summary([t / o for t, o in zip(times, mine)])
            continue
        over[algorithm] = {
            kind: summary(
                [BYTES[algorithm] * t / (item * o) for t, o in zip(seconds["triad"], mine)]
            )
            for kind, item in (("triad", 12), ("triad_16", 16))
        }
    return over, bytes_of


def print_table(over, medians):
    for algorithm, others in over.items():
        print(f"{algorithm}: ours {medians[algorithm + ' ours'] * 1e3:.2f} ms")
        for who, of in others.items():
            interval = of["interval"] or (of["least"], of["largest"])
            print(
                f"  over {who:<10} {of['median']:.3f} ({interval[0]:.3f} to "
                f"{interval[1]:.3f}), {of['least']:.3f} to {of['largest']:.3f}"
            )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("library")
    parser.add_argument("--numel", type=int, default=1 << 26)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", default=",".join(STATES), help="algorithms")
    parser.add_argument("--no-deepspeed", action="store_true")
    options = parser.parse_args()
    algorithms = options.only.split(",")
    if not set(algorithms) <= set(STATES):
        parser.error(f"--only: expected some of {','.join(STATES)}")
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    import torch

    torch.set_num_threads(options.threads)
    library = load(options.library)
    buffers = Buffers(torch, options.numel)
    steps = {}
    for algorithm in algorithms:
        check(torch, library, options, algorithm)
        for who, step in contestants(
            torch, library, options, algorithm, buffers
        ).items():
            steps[f"{algorithm} {who}"] = step
    master, signed, positive = buffers.all
    steps["triad"] = lambda number: library.tessera_triad(
        master.data_ptr(), signed.data_ptr(), positive.data_ptr(), 0.5,
        options.numel, options.threads,
    )  # fmt: skip
    seconds = measure(steps, options.rounds)
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    over, bytes_of = compare(seconds)
    print_table(over, medians)
    rates = {n: bytes_of[n] * options.numel / t * 1e-9 for n, t in medians.items()}
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
                "over": over,
            }
        )
    )


if __name__ == "__main__":
    main()
