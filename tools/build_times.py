"""Where the time of a run of bazel went, from the profile that it writes.

Bazel's --profile is a JSON trace. An action's event spans its wait for a free
processor, which is an event of its own on the same thread; what is left is the
action's own time.
"""

import collections
import gzip
import json
import os
import re
import xml.etree.ElementTree as ElementTree

Action = collections.namedtuple("Action", "kind name seconds waited")
KINDS = ("Compiling", "Linking", "Testing")
SLOWEST = 15
DEAREST = 20


def read_actions(path):
    """Returns the actions of a profile that were run, not found in a cache."""
    try:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            events = json.load(file)["traceEvents"]
    except (OSError, EOFError, ValueError):
        return []  # bazel did not come to write it, or was killed meanwhile
    threads = collections.defaultdict(list)
    waits = collections.defaultdict(list)
    for event in events:
        if event.get("ph") != "X":
            continue
        if event.get("cat") == "action processing":
            threads[event["tid"]].append(event)
        elif event.get("cat") == "action resource lock":
            waits[event["tid"]].append(event)
    actions = []
    for thread, own in threads.items():
        for event in own:
            kind, _, name = event["name"].partition(" ")
            end = event["ts"] + event["dur"]
            waited = sum(wait["dur"] for wait in waits[thread]
                         if event["ts"] <= wait["ts"] < end)
            actions.append(Action(kind, name, (event["dur"] - waited) / 1e6,
                                  waited / 1e6))
    return actions


def rank_starts(path):
    """Returns (starts, seconds) that a test.xml says of its ranks."""
    try:
        root = ElementTree.parse(path).getroot()
    except (OSError, ElementTree.ParseError):
        return 0, 0.0
    return (int(root.get("rank_pool_starts", 0)),
            int(root.get("rank_pool_start_ms", 0)) / 1e3)


def room_of(action):
    """Returns the first two folders of what an action compiles, links or tests."""
    name = re.sub(r"^bazel-out/[^/]*/bin/", "", action.name)
    folder = (name[2:].split(":")[0] if name.startswith("//")
              else os.path.dirname(name))
    return "/".join(folder.split("/")[:2]) or "."


def room_table(actions, test_reports):
    """Returns a line for each of the dearest rooms, and one for all others."""
    columns = {"Compiling": 0, "Precompiling": 0, "Linking": 1, "Testing": 2}
    rooms = collections.defaultdict(lambda: [0.0] * 5)
    for action in actions:
        if action.kind not in columns:
            continue
        row = rooms[room_of(action)]
        row[columns[action.kind]] += action.seconds
        row[4] += action.waited
        if action.kind == "Testing":
            row[3] += sum(rank_starts(path)[0]
                          for path in test_reports.get(action.name, []))
    dearest = sorted(rooms.items(), key=lambda room: (-sum(room[1][:3]), room[0]))
    rows, others = dearest[:DEAREST], [row for _, row in dearest[DEAREST:]]
    if others:
        rows.append(("%d others" % len(others), [sum(c) for c in zip(*others)]))
    return ["%-24s %8s %8s %8s %8s %8s" % (
        "seconds by room", "compile", "link", "test", "starts", "queued")] + [
            "%-24s %8.0f %8.0f %8.0f %8d %8.0f" % (name, *row) for name, row in rows]


def table(actions, test_reports):
    """Returns the lines to print; none where nothing was run.

    test_reports: the paths of the test.xml files, by the test's label.
    """
    if not actions:
        return []
    lines = ["%-24s %8s %8s %8s" % ("", "actions", "seconds", "queued")]
    for kind in KINDS:
        own = [a for a in actions if a.kind == kind]
        lines.append("%-24s %8d %8.0f %8.0f" % (
            kind.lower(), len(own), sum(a.seconds for a in own),
            sum(a.waited for a in own)))
    tests = sorted((a for a in actions if a.kind == "Testing"),
                   key=lambda a: -a.seconds)
    # What was found in a cache has a report, too.
    starts = [rank_starts(path) for a in tests
              for path in test_reports.get(a.name, [])]
    if any(count for count, _ in starts):
        lines.append("%-24s %8d %8.0f" % (
            "  starting ranks", sum(count for count, _ in starts),
            sum(seconds for _, seconds in starts)))
    lines += room_table(actions, test_reports)
    if tests:
        lines.append("slowest tests, seconds:")
        lines += ["%8.1f  %s" % (a.seconds, a.name) for a in tests[:SLOWEST]]
    return lines
