#!/usr/bin/python3
"""Draws the pictures of speed, one for each kind of machine.

docs/race.svg shows all trainings of benchmarks/results/*.md that are beside a peer's,
on CPUs: the ratio of speeds with its 95 % interval, as the tables have it; nothing
else and nothing left out. docs/race_gpu.svg shows the times of a step in the table of
docs/benchmarks.md, "On a GPU". `docs/generate/update` calls it.
"""

import collections
import glob
import math
import os
import re
import sys
import xml.sax.saxutils

PICTURE = "docs/race.svg"
GPU_PICTURE = "docs/race_gpu.svg"
GPU_PAGE = "docs/benchmarks.md"
GPU_MOST_MS = 130.0
RESULTS = "benchmarks/results"
PEERS = ("PyTorch", "DeepSpeed")
WIDTH, LEFT, RIGHT, LINE, TOP = 860, 392, 110, 20, 92
LEAST, MOST = 0.9, 10.0
TICKS = (1, 1.5, 2, 3, 4, 6, 8)
MARKS = ("circle", "square", "triangle")

Ratio = collections.namedtuple("Ratio", "machine row work ours peer median low high date")

STYLE = """
  text { font: 12px system-ui, -apple-system, 'Segoe UI', 'Liberation Sans', sans-serif; fill: #1f2328; }
  .title { font-size: 16px; font-weight: 600; }
  .small { font-size: 11px; fill: #59636e; }
  .number { font-size: 11px; }
  .number tspan { stroke: none; }
  .peer { fill: #8c959f; }
  .work { font-weight: 600; }
  .grid { stroke: #d1d9e0; stroke-width: 1; }
  .one { stroke: #59636e; stroke-width: 1.5; }
  .m0 { fill: #0969da; stroke: #0969da; }
  .m1 { fill: #bc4c00; stroke: #bc4c00; }
  .m2 { fill: #1a7f37; stroke: #1a7f37; }
  .whisker { fill: none; stroke-width: 1.5; }
  @media (prefers-color-scheme: dark) {
    text { fill: #f0f6fc; }
    .small { fill: #9198a1; }
    .grid { stroke: #3d444d; }
    .one { stroke: #9198a1; }
    .m0 { fill: #4493f8; stroke: #4493f8; }
    .m1 { fill: #f0883e; stroke: #f0883e; }
    .m2 { fill: #3fb950; stroke: #3fb950; }
  }
"""


def ratios(root):
    """All ratios of speeds beside a peer, in the order of the files and their rows."""
    found = []
    for path in sorted(glob.glob(os.path.join(root, RESULTS, "*.md"))):
        with open(path, encoding="utf-8") as file:
            text = file.read()
        machine = re.match(r"# Ours and theirs: (.*)", text)[1]
        for row, body in re.findall(r"(?s)<!-- row (\w) -->\n(.*?)<!-- end of row", text):
            work = re.search(r"(?m)^### \w: (.*)", body)[1]
            date = re.search(r"(?m)^(\d{4}-\d\d-\d\d), commit", body)[1]
            for line in re.findall(r"(?m)^\| (Tessera.*) \|$", body):
                cells = [cell.strip() for cell in line.split(" | ")]
                if cells[2] != "tokens/s" or not cells[1].startswith(PEERS):
                    continue
                low, high = map(float, cells[5].split(" to "))
                found.append(Ratio(machine, row, work, cells[0], cells[1],
                                   float(cells[4]), low, high, date))
    return found


def short(work):
    """'dim 512, ...: 25.6 M parameters, fp32, x' -> '25.6 M parameters, fp32, x'."""
    return work.split(": ", 1)[1].replace(", the other peers", "")


def x_of(value):
    at = math.log(value / LEAST) / math.log(MOST / LEAST)
    return LEFT + at * (WIDTH - LEFT - RIGHT)


def mark(which, x, y):
    """A machine's mark around a point."""
    if MARKS[which] == "circle":
        return '<circle class="m%d" cx="%.1f" cy="%.1f" r="4"/>' % (which, x, y)
    if MARKS[which] == "square":
        return '<rect class="m%d" x="%.1f" y="%.1f" width="7" height="7"/>' % (
            which, x - 3.5, y - 3.5)
    return '<path class="m%d" d="M%.1f %.1fl4.5 8h-9z"/>' % (which, x, y - 5)


def text(x, y, words, kind="", anchor="start"):
    return '<text x="%.1f" y="%.1f"%s%s>%s</text>' % (
        x, y, ' class="%s"' % kind if kind else "",
        "" if anchor == "start" else ' text-anchor="%s"' % anchor,
        xml.sax.saxutils.escape(words))


def medians(measured, machines, y):
    """The numbers of a line, at the right, each in the colour of its machine."""
    spans = ('<tspan class="m%d">%.2f×</tspan>' % (machines.index(r.machine), r.median)
             for r in measured)
    return '<text x="%.1f" y="%.1f" class="number" text-anchor="end">%s</text>' % (
        WIDTH - 16, y, "  ".join(spans))


def svg(height, title, body):
    return "\n".join(
        ['<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %d %d" width="%d" height="%d" '
         'role="img">' % (WIDTH, height, WIDTH, height),
         "<title>%s</title>" % title, "<style>%s</style>" % STYLE, *body, "</svg>"]) + "\n"


def picture(root):
    """Returns the SVG of the CPUs."""
    found = ratios(root)
    machines = list(dict.fromkeys(r.machine for r in found))
    if not found or len(machines) > len(MARKS):
        raise SystemExit("race: %d machines, marks for %d" % (len(machines), len(MARKS)))
    works = collections.OrderedDict()
    for r in sorted(found, key=lambda r: r.row):
        works.setdefault(short(r.work), collections.OrderedDict()).setdefault(
            (r.ours, r.peer), []).append(r)
    out, y = [], TOP
    for work, pairs in works.items():
        y += LINE + 4
        out.append(text(16, y + 4, work, "work"))
        for (ours, peer), measured in pairs.items():
            y += LINE
            out.append(text(30, y + 4, "%s, beside %s" % (
                ours.replace("Tessera, ", ""), peer.replace("PyTorch ", "")), "small"))
            for r in measured:
                which = machines.index(r.machine)
                at = y + 5 * (measured.index(r) - (len(measured) - 1) / 2)
                out.append('<path class="whisker m%d" d="M%.1f %.1fH%.1f"/>' % (
                    which, x_of(r.low), at, x_of(r.high)))
                out.append(mark(which, x_of(r.median), at))
            out.append(medians(measured, machines, y + 4))
    bottom = y + LINE
    grid = ['<path class="%s" d="M%.1f %dV%d"/>%s' % (
        "one" if tick == 1 else "grid", x_of(tick), TOP + 4, bottom,
        text(x_of(tick), bottom + 15, "as fast" if tick == 1 else "%g×" % tick,
             "small", "middle")) for tick in TICKS]
    dates = sorted({r.date for r in found})
    head = [text(16, 24, "CPU ranks: speed of a training step, Tessera relative to the peers",
                 "title")]
    for which, machine in enumerate(machines):
        head.append(mark(which, 22, 42 + 17 * which))
        head.append(text(34, 46 + 17 * which, machine, "small"))
    axis = text((x_of(1) + x_of(TICKS[-1])) / 2, bottom + 33,
                "Tessera's tokens/s divided by the peer's (log scale)", "small", "middle")
    foot = text(16, bottom + 55, "Two ranks, one thread each. Medians and 95 %% intervals of 15 "
                "rounds, %s to %s; every result beside a peer." % (dates[0], dates[-1]),
                "small")
    return svg(bottom + 69, "Speed of training steps, Tessera over PyTorch's DDP, FSDP and DeepSpeed",
               [*head, *grid, *out, axis, foot])


def gpu_times(root):
    """[(what, {engine: milliseconds})] of the table of the GPU."""
    with open(os.path.join(root, GPU_PAGE), encoding="utf-8") as file:
        section = re.search(r"(?s)\n## On a GPU\n(.*?)\n## ", file.read())[1]
    rows = [[cell.strip() for cell in line.strip("|").split("|")]
            for line in re.findall(r"(?m)^\|.*\|$", section)]
    engines = rows[0][1:]
    return rows[0][0], [(row[0].replace(", ms", ""), dict(zip(engines, map(float, row[1:]))))
                        for row in rows if row[0].endswith(", ms")]


def gpu_picture(root):
    """Returns the SVG of the GPU: bars of milliseconds, from zero."""
    model, groups = gpu_times(root)
    names = {"plain": "plain libtorch, autocast", "stage 0": "Tessera, stage 0",
             "stage 3": "Tessera, stage 3", "FSDP2": "FSDP2, eager"}
    left, y, out = 190, 40, []
    scale = (WIDTH - left - 80) / GPU_MOST_MS
    for what, times in groups:
        y += LINE + 6
        out.append(text(16, y, what[0].upper() + what[1:], "work"))
        for engine, ms in times.items():
            y += LINE
            out.append(text(30, y, names[engine], "small"))
            out.append('<rect class="%s" x="%d" y="%d" width="%.1f" height="13" rx="2"/>' % (
                "m0" if engine.startswith("stage") else "peer", left, y - 10, ms * scale))
            out.append(text(left + ms * scale + 6, y, "%.1f" % ms, "small"))
    y += 14
    grid = ['<path class="grid" d="M%.1f 56V%d"/>%s' % (
        left + ms * scale, y, text(left + ms * scale, y + 15, "%d" % ms, "small", "middle"))
            for ms in range(0, 121, 20)]
    head = text(16, 24, "One NVIDIA H200: time of a training step (shorter is better)", "title")
    axis = text(left + 60 * scale, y + 33, "milliseconds per step", "small", "middle")
    foot = text(16, y + 55, "GPT of %s, bf16, one rank; medians of four rounds. At 2 x 1024 "
                "tokens all wait for the host." % model, "small")
    return svg(y + 69, "Time of a training step on one NVIDIA H200",
               [head, *grid, *out, axis, foot])


def main():
    root = sys.argv[1] if len(sys.argv) > 1 else "."
    for path, made in ((PICTURE, picture), (GPU_PICTURE, gpu_picture)):
        with open(os.path.join(root, path), "w", encoding="utf-8") as file:
            file.write(made(root))
        print(path)


if __name__ == "__main__":
    main()
