#!/usr/bin/python3
"""Losses of the demo's GPT at ZeRO stages 0 to 3, on two ranks.

usage: curves.py TRAIN [--data FILE] [--run short|full] [--out FOLDER]

TRAIN is the built program, bazel-bin/examples/gpt/train; FILE the text, by
default the King James Bible of Debian's package bible-kjv. Each stage trains
the same steps; their losses must be the same bits, step by step, and the loss of
text that is held out must be at most what is stated in RUNS. Ends with an error
otherwise. With --out writes curves.md and curves.svg there:

  bazel build //examples/gpt:train
  examples/gpt/curves.py bazel-bin/examples/gpt/train --run full --out docs
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile

# steps: of the optimizer. bound: of the loss, in nats per byte, of the text
# held out. text: passages of the Bible.
RUNS = {
    "short": dict(steps=40, bound=2.9, text="gen1:1-gen10:32",
                  sizes=dict(dim=64, layers=2, heads=2, seq=32), held_out=32),
    "full": dict(steps=200, bound=2.3, text="gen1:1-rev22:21",
                 sizes=dict(dim=128, layers=4, heads=4, seq=64), held_out=64),
}
WORLD = 2
CONFIG = "examples/gpt/demo.json"


def configuration(steps, path):
    """The demo's, with its rate going down over these steps."""
    config = json.load(open(CONFIG))
    rates = config["scheduler"]["params"]
    rates["total_num_steps"] = steps
    rates["warmup_num_steps"] = min(rates["warmup_num_steps"], steps // 4)
    json.dump(config, open(path, "w"))


def train(program, stage, run, data, config):
    command = [program, "--world=%d" % WORLD, "--stage=%d" % stage,
               "--data=" + data, "--config=" + config, "--json", "--quiet",
               "--prefix_output=off", "--steps=%d" % run["steps"],
               "--held_out=%d" % run["held_out"]]
    command += ["--%s=%d" % size for size in run["sizes"].items()]
    out = subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout
    return json.loads(out.splitlines()[-1])


def svg(losses, bound):
    """A curve of the losses, each the mean of the steps around it."""
    width, height, left, bottom = 720, 360, 48, 32
    low, high = 1.0, 6.0
    near = max(1, len(losses) // 100)

    def x(step):
        return left + (width - left - 8) * step / len(losses)

    def y(loss):
        return height - bottom - (height - bottom - 8) * (loss - low) / (
            high - low)

    points = []
    for i in range(len(losses)):
        part = losses[max(0, i - near):i + near + 1]
        points.append("%.1f,%.1f" % (x(i + 1), y(sum(part) / len(part))))
    lines = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %d %d" '
        'font-family="sans-serif" font-size="12">' % (width, height),
        '<rect width="%d" height="%d" fill="white"/>' % (width, height),
    ]
    for loss in range(int(low), int(high) + 1):
        lines.append('<path d="M%d %.1fH%d" stroke="#ddd"/>'
                     '<text x="8" y="%.1f">%d</text>' %
                     (left, y(loss), width - 8, y(loss) + 4, loss))
    for tenth in range(0, 11, 2):
        step = len(losses) * tenth // 10
        lines.append('<text x="%.1f" y="%d" text-anchor="middle">%d</text>' %
                     (x(step), height - 10, step))
    lines.append('<path d="M%d %.1fH%d" stroke="#c33" stroke-dasharray="6 4"/>'
                 % (left, y(bound), width - 8))
    lines.append('<polyline fill="none" stroke="#236" stroke-width="1.5" '
                 'points="%s"/>' % " ".join(points))
    return "\n".join(lines + ["</svg>", ""])


def page(run, reports):
    losses = [float.fromhex(loss) for loss in reports[0]["losses"]]
    sizes = run["sizes"]
    lines = [
        "# Losses at stages 0 to 3", "",
        "Written by `examples/gpt/curves.py bazel-bin/examples/gpt/train --run "
        "full --out docs`.", "",
        "A GPT of %(layers)d layers of width %(dim)d with a context of %(seq)d "
        "bytes, on the King James Bible," % sizes,
        "%d ranks, `%s` with a rate that decays over %d steps. All stages have "
        "the same" % (WORLD, CONFIG, run["steps"]),
        "losses, to the last bit, at every step: the curve shows all four.",
        "", "![losses by step](curves.svg)", "",
        "| step | loss at stages 0, 1, 2 and 3 | bits |", "|---:|---:|---|",
    ]
    for tenth in range(11):
        step = max(1, run["steps"] * tenth // 10)
        lines.append("| %d | %.4f | %s |" %
                     (step, losses[step - 1], reports[0]["losses"][step - 1]))
    held = float.fromhex(reports[0]["held_out_loss"])
    lines += [
        "", "The loss of %d held-out samples is %.4f nats per byte (%s) at "
        "every stage. The program" %
        (run["held_out"], held, reports[0]["held_out_loss"]),
        "that writes this page checks that it is at most %.1f. "
        "`//examples/gpt:curves_test` makes a shorter run," % run["bound"],
        "%d steps of a smaller model, and checks %.1f." %
        (RUNS["short"]["steps"], RUNS["short"]["bound"]), ""
    ]
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(
        usage=__doc__.split("\n")[2].split("usage: ")[1])
    parser.add_argument("train")
    parser.add_argument("--data")
    parser.add_argument("--run", choices=sorted(RUNS), default="full")
    parser.add_argument("--out")
    options = parser.parse_args()
    run = RUNS[options.run]
    with tempfile.TemporaryDirectory() as folder:
        data = options.data
        if data is None:
            data = os.path.join(folder, "text")
            with open(data, "wb") as file:
                subprocess.run(["bible", "-f", run["text"]], stdout=file,
                               check=True)
        config = os.path.join(folder, "config.json")
        configuration(run["steps"], config)
        reports = []
        for stage in range(4):
            reports.append(train(options.train, stage, run, data, config))
            report = reports[-1]
            held = float.fromhex(report["held_out_loss"])
            print("stage %d: loss %.4f -> %.4f in %d steps, held out %.4f (%s)" %
                  (stage, report["first_loss"], report["last_loss"],
                   run["steps"], held, report["held_out_loss"]), flush=True)
            if len(report["losses"]) != run["steps"]:
                sys.exit("stage %d: %d losses" % (stage, len(report["losses"])))
            for key in ("losses", "held_out_loss"):
                if report[key] != reports[0][key]:
                    sys.exit("stage %d has other %s than stage 0" % (stage, key))
            if not held <= run["bound"]:
                sys.exit("stage %d: the loss of the text held out is %.4f, more "
                         "than %.1f" % (stage, held, run["bound"]))
    if options.out:
        with open(os.path.join(options.out, "curves.md"), "w") as file:
            file.write(page(run, reports))
        losses = [float.fromhex(loss) for loss in reports[0]["losses"]]
        with open(os.path.join(options.out, "curves.svg"), "w") as file:
            file.write(svg(losses, run["bound"]))


if __name__ == "__main__":
    main()
