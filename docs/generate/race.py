#!/usr/bin/python3
"""Draws docs/race.svg: our steps beside those of the peers, on each machine.

Shown are all trainings of benchmarks/results/*.md that are beside a peer's: the
ratio of speeds with its 95 % interval, as the tables have it; nothing else and
nothing left out. `docs/generate/update` calls it.
"""

import collections
import glob
import math
import os
import re
import sys
import xml.sax.saxutils

PICTURE = "docs/race.svg"
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


def picture(root):
    """Returns the SVG."""
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
            out.append(text(WIDTH - 16, y + 4, ", ".join(
                "%.3f" % r.median for r in measured), "small", "end"))
    bottom = y + LINE
    grid = ['<path class="%s" d="M%.1f %dV%d"/>%s' % (
        "one" if tick == 1 else "grid", x_of(tick), TOP + 4, bottom,
        text(x_of(tick), bottom + 15, "as fast" if tick == 1 else "%g×" % tick,
             "small", "middle")) for tick in TICKS]
    dates = sorted({r.date for r in found})
    head = [text(16, 24, "Speed of training steps: Tessera over the peers, two ranks on two CPUs",
                 "title")]
    for which, machine in enumerate(machines):
        head.append(mark(which, 22, 42 + 17 * which))
        head.append(text(34, 46 + 17 * which, machine, "small"))
    foot = text(16, bottom + 38, "Medians and 95 %% intervals of 15 rounds in turns, as in "
                "benchmarks/results of %s to %s; all trainings there beside a peer." % (
                    dates[0], dates[-1]), "small")
    return "\n".join(
        ['<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %d %d" width="%d" height="%d" '
         'role="img">' % (WIDTH, bottom + 52, WIDTH, bottom + 52),
         "<title>Speed of training steps, Tessera over PyTorch's DDP, FSDP and DeepSpeed</title>",
         "<style>%s</style>" % STYLE, *head, *grid, *out, foot, "</svg>"]) + "\n"


def main():
    root = sys.argv[1] if len(sys.argv) > 1 else "."
    with open(os.path.join(root, PICTURE), "w", encoding="utf-8") as file:
        file.write(picture(root))
    print(PICTURE)


if __name__ == "__main__":
    main()
