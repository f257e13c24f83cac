#!/usr/bin/python3
"""Does any room cost a check more than tools/room_costs.txt allows?

Counts what BUILD files declare, no seconds: test programs, each of which is linked
and loads libtorch; runs of them that start ranks; compilations that read libtorch's
header, of tests or not (tools/joined.bzl). Slow tests are not counted. A room that is not in the table has nothing
of these. `tools/room_costs_test.py --print` prints the table as it would be for the
tree as it is.
"""

import ast
import collections
import os
import sys
import tempfile
import unittest

TESTS = ("cc_test", "tessera_cc_test", "tessera_rank_test")
COMPILED = TESTS + ("tessera_cc_library", "tessera_cc_binary")
# Files may be added to a room's targets, which are compiled as so many as here.
JOINED = 16  # _MOST_FILES of tools/joined.bzl
STEP = 2

Costs = collections.namedtuple("Costs", "programs rank_runs torch_units")
NAMES = Costs("test programs", "runs that start ranks",
              "compilations with libtorch's header")


def read_table(path):
    """Returns {room: Costs} of a file of lines "room programs rank_runs torch"."""
    table = {}
    with open(path, encoding="utf-8") as file:
        for line in file:
            words = line.split("#")[0].split()
            if words:
                table[words[0]] = Costs(*map(int, words[1:]))
    return table


def calls(tree, times=1):
    """Yields (call, how often it is made): a list's comprehension repeats it."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ListComp) and isinstance(node.elt, ast.Call):
            items = node.generators[0].iter
            known = isinstance(items, (ast.List, ast.Tuple))
            yield node.elt, times * (len(items.elts) if known else 1)
        elif isinstance(node, ast.Call):
            yield node, times
        else:
            yield from calls(node, times)


def count_of(call):
    """Returns the Costs of one rule."""
    rule = getattr(call.func, "id", "")
    given = {keyword.arg: keyword.value for keyword in call.keywords}
    if rule == "tessera_run_again_test":
        slow = any(getattr(node, "value", None) == "slow"
                   for node in ast.walk(given.get("tags", call.func)))
        return Costs(0, 0 if slow else 1, 0)
    if rule not in COMPILED:
        return Costs(0, 0, 0)
    ranks = rule == "tessera_rank_test"
    files = len([node for node in ast.walk(given["srcs"])
                 if str(getattr(node, "value", "")).endswith(".cc")]
                ) if "srcs" in given else 0
    return Costs(
        1 if rule in TESTS else 0,
        1 + len(getattr(given.get("backends"), "elts", ())) if ranks else 0,
        -(-files // JOINED) if ranks or "torch_pch" in given else 0)


def count_tree(root):
    """Returns {room: Costs} of all folders that have any."""
    rooms = {}
    for folder, inside, files in os.walk(root):
        inside[:] = [name for name in inside
                     if not name.startswith((".", "bazel-")) and
                     name not in ("shared", "third_party")]
        if "BUILD" not in files:
            continue
        with open(os.path.join(folder, "BUILD"), encoding="utf-8") as file:
            made = [(count_of(call), times)
                    for call, times in calls(ast.parse(file.read()))]
        costs = Costs(*(sum(costs[i] * times for costs, times in made)
                        for i in range(3)))
        if any(costs):
            rooms[os.path.relpath(folder, root)] = costs
    return rooms


def check(rooms, table):
    """Yields a line for each cost that is higher than the table's."""
    for room, costs in sorted(rooms.items()):
        for name, cost, allowed in zip(NAMES, costs, table.get(room, (0, 0, 0))):
            if cost > allowed:
                yield "%s: %d %s, of %d in tools/room_costs.txt" % (
                    room, cost, name, allowed)


def lines(rooms):
    """Yields the lines of a table that allows what there is."""
    for room, costs in sorted(rooms.items()):
        yield "%-28s %3d %3d %3d" % (
            room, costs.programs, costs.rank_runs,
            -(-costs.torch_units // STEP) * STEP)


class OnMadeUpTree(unittest.TestCase):
    """Can the check fail?"""

    def count(self, build):
        with tempfile.TemporaryDirectory() as root:
            os.mkdir(os.path.join(root, "room"))
            with open(os.path.join(root, "room", "BUILD"), "w",
                      encoding="utf-8") as file:
                file.write(build)
            return count_tree(root).get("room")

    def test_a_test_of_ranks(self):
        self.assertEqual(
            Costs(1, 3, 1), self.count(
                'tessera_rank_test(name = "a", srcs = ["a.cc", "a.h", "b.cc"],\n'
                '    backends = ["gloo", "hierarchical"], slow = {"args": []})'))

    def test_another_run(self):
        again = 'tessera_run_again_test(name = "a", binary = "b", tags = [%s])'
        self.assertEqual(Costs(0, 1, 0), self.count(again % '"cpu:2"'))
        self.assertIsNone(self.count(again % '"slow"'))

    def test_a_list_of_tests(self):
        self.assertEqual(
            Costs(2, 0, 2), self.count(
                '[tessera_cc_test(name = n, srcs = [n + ".cc"], torch_pch = True)\n'
                ' for n in ["a", "b"]]'))

    def test_more_files_than_are_joined(self):
        files = ", ".join('"%d.cc"' % i for i in range(17))
        self.assertEqual(
            Costs(0, 0, 2), self.count(
                'tessera_cc_library(name = "a", srcs = [%s], torch_pch = True)' % files))

    def test_libraries(self):
        self.assertEqual(
            Costs(0, 0, 1), self.count(
                'tessera_cc_library(name = "a", srcs = ["a.cc"], torch_pch = True)\n'
                'tessera_cc_library(name = "b", srcs = ["b.cc"])'))

    def test_more_than_the_table(self):
        table = {"a": Costs(1, 0, 5)}
        self.assertEqual([], list(check({"a": Costs(1, 0, 4)}, table)))
        self.assertEqual(
            ["a: 2 test programs, of 1 in tools/room_costs.txt",
             "b: 1 runs that start ranks, of 0 in tools/room_costs.txt"],
            list(check({"a": Costs(2, 0, 5), "b": Costs(0, 1, 0)}, table)))


class OnThisTree(unittest.TestCase):
    def test_rooms(self):
        root = os.path.dirname(os.path.realpath("WORKSPACE"))
        rooms = count_tree(root)
        self.assertGreater(len(rooms), 50)
        faults = list(check(rooms, read_table("tools/room_costs.txt")))
        self.assertEqual(0, len(faults), "\n" + "\n".join(faults))


if __name__ == "__main__":
    if sys.argv[1:] == ["--print"]:
        sys.exit(print("\n".join(lines(count_tree(os.getcwd())))))
    sys.exit(unittest.main(verbosity=2))
