"""Makes rates.txt beside it, for engine/build/rate_settings_test.cc.

    make_rates.py LR_SCHEDULES > rates.txt

with torch 2.11, and LR_SCHEDULES the deepspeed/runtime/lr_schedules.py of
deepspeed 0.19.8. For each case and two rates of the optimizer: the scheduler of a
configuration, and the rate of each step, beta1 where the scheduler sets it, and
what was reported after each step to ReduceLROnPlateau. Numbers are hexadecimal;
~ is the number before.

What neither library has (WSD, warm-ups that are no straight lines) is a function
here, multiplied with the rate by torch's LambdaLR.
"""

import importlib.util
import json
import math
import sys
import types
import warnings

import torch
from torch.optim import lr_scheduler

STEPS = 64
RATES = (0.02, 3e-4)
DEEPSPEED = None


def load_deepspeed(path):
    utils = types.ModuleType("deepspeed.utils")
    utils.logger = types.SimpleNamespace(warning=lambda *_: None)
    sys.modules["deepspeed"] = types.ModuleType("deepspeed")
    sys.modules["deepspeed.utils"] = utils
    spec = importlib.util.spec_from_file_location("lr_schedules", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# What follows is called with the parameters of a case: what is missing there has
# its default here.
def wsd(total_num_steps, decay_num_steps, warmup_num_steps=0, warmup_min_ratio=0,
        decay_type="linear", decay_min_ratio=0):
    shape = {
        "linear": lambda x: 1 - x,
        "cosine": lambda x: (1 + math.cos(math.pi * x)) / 2,
        "1-sqrt": lambda x: 1 - math.sqrt(x),
    }[decay_type]

    def factor(step):
        if step < warmup_num_steps:
            part = step / warmup_num_steps
            return warmup_min_ratio + (1 - warmup_min_ratio) * part
        hold = total_num_steps - decay_num_steps
        if step < hold:
            return 1
        if step >= total_num_steps:
            return decay_min_ratio
        return decay_min_ratio + (1 - decay_min_ratio) * shape(
            (step - hold) / decay_num_steps)

    return factor


def curved_warmup(num_steps, start_factor, shape):
    def factor(step):
        if step >= num_steps:
            return 1
        part = step / num_steps
        if shape == "exponential":
            return start_factor ** (1 - part)
        return start_factor + (1 - start_factor) * (
            1 - math.cos(math.pi * part)) / 2

    return factor


def make(optimizer, kind, params):
    if kind is None:
        return lr_scheduler.LambdaLR(optimizer, lambda _: 1)
    if kind == "WSD":
        return lr_scheduler.LambdaLR(optimizer, wsd(**params))
    if hasattr(DEEPSPEED, kind):
        return getattr(DEEPSPEED, kind)(optimizer, **params)
    return getattr(lr_scheduler, kind)(optimizer, **params)


def make_with_warmup(optimizer, kind, params, warmup):
    if warmup is None:
        return make(optimizer, kind, params)
    if warmup.get("shape", "linear") != "linear":
        return lr_scheduler.LambdaLR(optimizer, curved_warmup(**warmup))
    steps = warmup["num_steps"]
    start = {k: v for k, v in warmup.items() if k == "start_factor"}
    first = lr_scheduler.LinearLR(optimizer, total_iters=steps, **start)
    return lr_scheduler.SequentialLR(
        optimizer, [first, make(optimizer, kind, params)], milestones=[steps])


def run(case, lr, metrics):
    optimizer = torch.optim.AdamW([torch.zeros(1, requires_grad=True)], lr=lr,
                                  betas=(0.75, 0.98))
    scheduler = make_with_warmup(optimizer, case.get("type"),
                                 case.get("params", {}), case.get("warmup"))
    group = optimizer.param_groups[0]
    rates, beta1, beta2 = [], [], []
    for step in range(len(metrics) if metrics else STEPS):
        rates.append(float(group["lr"]))
        beta1.append(float(group["betas"][0]))
        beta2.append(float(group["betas"][1]))
        optimizer.step()
        if metrics:
            scheduler.step(metrics[step])
        elif not (case.get("type") == "OneCycleLR" and step + 1 == STEPS):
            scheduler.step()
    return rates, beta1, beta2


def put_numbers(name, numbers):
    words = [n.hex() for n in numbers]
    print(name, *("~" if i > 0 and word == words[i - 1] else word
                  for i, word in enumerate(words)))


def put(case, metrics=None):
    for lr in RATES:
        rates, beta1, beta2 = run(case, lr, metrics)
        print("scheduler", json.dumps(case))
        put_numbers("lr", [lr])
        if metrics:
            put_numbers("metrics", metrics)
        put_numbers("rates", rates)
        if any(b != 0.75 for b in beta1):
            put_numbers("beta1", beta1)
        if any(b != 0.98 for b in beta2):
            put_numbers("beta2", beta2)
        print()


TORCH = [
    ("StepLR", {"step_size": 7}),
    ("StepLR", {"step_size": 1, "gamma": 0.93}),
    ("MultiStepLR", {"milestones": [3, 10, 10, 41], "gamma": 0.3}),
    ("MultiStepLR", {"milestones": [0, 5]}),
    ("ConstantLR", {}),
    ("ConstantLR", {"factor": 0.7, "total_iters": 20}),
    ("LinearLR", {}),
    ("LinearLR", {"start_factor": 0.9, "end_factor": 0.07, "total_iters": 37}),
    ("ExponentialLR", {"gamma": 0.97}),
    ("PolynomialLR", {}),
    ("PolynomialLR", {"total_iters": 50, "power": 1.7}),
    ("CosineAnnealingLR", {"T_max": 20}),
    ("CosineAnnealingLR", {"T_max": 47, "eta_min": 0.00081}),
    ("CosineAnnealingLR", {"T_max": 1, "eta_min": 1e-5}),
    ("CosineAnnealingWarmRestarts", {"T_0": 9}),
    ("CosineAnnealingWarmRestarts", {"T_0": 5, "T_mult": 2, "eta_min": 1e-4}),
    ("OneCycleLR", {"max_lr": 0.1, "total_steps": STEPS}),
    ("OneCycleLR", {"max_lr": 0.03, "epochs": 8, "steps_per_epoch": 8,
                    "pct_start": 0.25, "anneal_strategy": "linear",
                    "div_factor": 10.0, "final_div_factor": 100.0,
                    "base_momentum": 0.8, "max_momentum": 0.9}),
    ("OneCycleLR", {"max_lr": 0.1, "total_steps": STEPS, "three_phase": True,
                    "cycle_momentum": False}),
    ("OneCycleLR", {"max_lr": 0.1, "total_steps": STEPS, "three_phase": True,
                    "pct_start": 0.4}),
    ("CyclicLR", {"base_lr": 1e-3, "max_lr": 0.1, "step_size_up": 7}),
    ("CyclicLR", {"base_lr": 1e-3, "max_lr": 0.1, "step_size_up": 5,
                  "step_size_down": 11, "mode": "triangular2"}),
    ("CyclicLR", {"base_lr": 1e-3, "max_lr": 0.1, "step_size_up": 6,
                  "mode": "exp_range", "gamma": 0.98, "base_momentum": 0.7,
                  "max_momentum": 0.95}),
    ("CyclicLR", {"base_lr": 1e-3, "max_lr": 0.1, "step_size_up": 9,
                  "cycle_momentum": False}),
]

WSD = [
    {"total_num_steps": 60, "decay_num_steps": 20},
    {"total_num_steps": 50, "decay_num_steps": 50, "decay_type": "cosine"},
    {"total_num_steps": 55, "decay_num_steps": 13, "decay_type": "1-sqrt",
     "warmup_num_steps": 11, "warmup_min_ratio": 0.01, "decay_min_ratio": 0.1},
    {"total_num_steps": 40, "decay_num_steps": 0, "warmup_num_steps": 40},
]

OF_DEEPSPEED = [
    ("WarmupLR", {"warmup_max_lr": 0.01, "warmup_num_steps": 40}),
    ("WarmupLR", {"warmup_min_lr": 0.001, "warmup_max_lr": 0.02,
                  "warmup_num_steps": 5, "warmup_type": "linear"}),
    ("WarmupLR", {"warmup_max_lr": 0.01, "warmup_num_steps": 40,
                  "last_batch_iteration": 2}),
    ("WarmupDecayLR", {"total_num_steps": 50, "warmup_num_steps": 13}),
    ("WarmupDecayLR", {"total_num_steps": 7, "warmup_min_lr": 0.002,
                       "warmup_num_steps": 2, "warmup_type": "linear"}),
    ("WarmupCosineLR", {"total_num_steps": 50, "warmup_num_steps": 13,
                        "warmup_min_ratio": 0.1, "cos_min_ratio": 0.01}),
    ("WarmupCosineLR", {"total_num_steps": 60, "warmup_num_steps": 1,
                        "warmup_type": "linear"}),
    ("OneCycle", {"cycle_min_lr": 0.001, "cycle_max_lr": 0.01,
                  "cycle_first_step_size": 13, "cycle_second_step_size": 20,
                  "decay_lr_rate": 0.5, "decay_step_size": 2,
                  "decay_mom_rate": 0.1}),
    ("OneCycle", {"cycle_min_lr": 0.001, "cycle_max_lr": 0.01,
                  "cycle_first_step_size": 20, "cycle_first_stair_count": 4,
                  "cycle_momentum": False}),
    ("LRRangeTest", {"lr_range_test_min_lr": 0.01,
                     "lr_range_test_step_size": 3,
                     "lr_range_test_step_rate": 2.0}),
    ("LRRangeTest", {"lr_range_test_min_lr": 0.01,
                     "lr_range_test_step_size": 5,
                     "lr_range_test_staircase": True}),
]

NAN, INF = math.nan, math.inf
FALLING = [10.0 * 0.9**min(i, 9) for i in range(STEPS)]
NOISY = [5 + 3 * math.sin(i * i) / (1 + 0.2 * i) for i in range(STEPS)]
BROKEN = [1.0, NAN, NAN, 2.0, -INF, -1.0, INF, NAN] * (STEPS // 8)
PLATEAU = [
    ({}, FALLING),
    ({"patience": 2, "factor": 0.5, "cooldown": 3, "min_lr": 1e-4}, NOISY),
    ({"patience": 0, "factor": 0.3, "eps": 1e-5}, NOISY),
    ({"mode": "max", "patience": 3, "threshold": 0.2}, NOISY),
    ({"mode": "max", "patience": 1, "threshold": 0.2,
      "threshold_mode": "abs", "factor": 0.7}, NOISY),
    ({"threshold_mode": "abs", "threshold": 0.5, "patience": 4}, FALLING),
    ({"threshold": 0.2, "patience": 1}, FALLING),
    ({"patience": 2, "factor": 0.9}, BROKEN),
    ({"mode": "max", "patience": 2, "factor": 0.9}, BROKEN),
]


def main(path):
    global DEEPSPEED
    DEEPSPEED = load_deepspeed(path)
    warnings.simplefilter("ignore")
    for kind, params in TORCH:
        put({"type": kind, "params": params})
    for kind, params in TORCH:
        if kind == "OneCycleLR" and "epochs" not in params:
            params = {**params, "total_steps": STEPS - 10}
        put({"type": kind, "params": params,
             "warmup": {"num_steps": 10, "start_factor": 0.05}})
    put({"type": "CosineAnnealingLR", "params": {"T_max": 23},
         "warmup": {"num_steps": 1}})
    put({"warmup": {"num_steps": 60}})
    for shape in ("exponential", "cosine"):
        put({"warmup": {"num_steps": 50, "start_factor": 0.01, "shape": shape}})
    for params in WSD:
        put({"type": "WSD", "params": params})
    for kind, params in OF_DEEPSPEED:
        put({"type": kind, "params": params})
    for params, metrics in PLATEAU:
        put({"type": "ReduceLROnPlateau", "params": params}, metrics)


main(sys.argv[1])
