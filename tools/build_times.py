"""Where the time of a run of bazel went, from the profile that it writes.

Bazel's --profile is a JSON trace. An action's event spans its wait for a free
processor, which is an event of its own on the same thread; what is left is the
action's own time.
"""

import collections
import gzip
import json
import xml.etree.ElementTree as ElementTree

Action = collections.namedtuple("Action", "kind name seconds waited")
KINDS = ("Compiling", "Linking", "Testing")
SLOWEST = 15


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
    if tests:
        lines.append("slowest tests, seconds:")
        lines += ["%8.1f  %s" % (a.seconds, a.name) for a in tests[:SLOWEST]]
    return lines
