#!/usr/bin/python3
"""Does every #include obey tools/layers.txt?

A folder is a layer; it may include its own headers and those of the layers that
its line names. Reads all .h, .cc, .cu and .cuh files of the workspace.
"""

import ast
import os
import re
import sys
import tempfile
import unittest

SOURCES = (".h", ".cc", ".cu", ".cuh")
INCLUDE = re.compile(r'\s*#\s*include\s*([<"])([^">]+)[">]')
# Folders of the workspace that are no layers.
OTHER = ("third_party", "docs", "shared")


def read_layers(path):
    """Returns {layer: list of the layers it may include}."""
    layers = {}
    with open(path, encoding="utf-8") as file:
        for line in file:
            line = line.split("#")[0].strip()
            if line:
                name, _, allowed = line.partition(":")
                layers[name.strip()] = allowed.split()
    return layers


def read_bazel_layers(path):
    """Returns the same table, from tools/visibility/layers.bzl."""
    with open(path, encoding="utf-8") as file:
        tree = ast.parse(file.read())
    for node in tree.body:
        if isinstance(node, ast.Assign) and node.targets[0].id == "LAYERS":
            return ast.literal_eval(node.value)
    raise ValueError("no LAYERS in " + path)


def sources(root):
    """Yields the paths of our sources, relative to root."""
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(
            name for name in folders
            if not name.startswith((".", "bazel-")) and not (
                folder == root and name in OTHER))
        for name in sorted(files):
            if name.endswith(SOURCES):
                yield os.path.relpath(os.path.join(folder, name), root)


def check_file(root, path, layers):
    """Yields a line for each fault of one file."""
    layer = path.split("/")[0] if "/" in path else ""
    if layer not in layers:
        yield "%s: %s/ is not in tools/layers.txt" % (path, layer or ".")
        return
    allowed = [layer] + layers[layer]
    with open(os.path.join(root, path), encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            match = INCLUDE.match(line)
            if not match:
                continue
            quote, header = match.groups()
            where = "%s:%d: " % (path, number)
            target = header.split("/")[0]
            if target in layers and "/" in header:
                if target not in allowed:
                    yield where + "%s/ may not include %s" % (layer, header)
                elif quote == "<":
                    yield where + 'write #include "%s"' % header
            elif quote == '"' and (header.startswith("../") or os.path.exists(
                    os.path.join(root, os.path.dirname(path), header))):
                yield where + "write %s from the workspace's root" % header


def check_tree(root, layers):
    faults = []
    for layer, allowed in layers.items():
        for other in allowed:
            if other not in layers:
                faults.append("layers.txt: %s: there is no %s" % (layer, other))
    for path in sources(root):
        faults.extend(check_file(root, path, layers))
    return faults


class OnMadeUpTree(unittest.TestCase):
    """Can the check fail?"""

    def faults(self, files):
        with tempfile.TemporaryDirectory() as root:
            for path, text in files.items():
                path = os.path.join(root, path)
                os.makedirs(os.path.dirname(path), exist_ok=True)
                with open(path, "w", encoding="utf-8") as file:
                    file.write(text)
            return check_tree(root, {"low": [], "high": ["low"]})

    def test_good(self):
        self.assertEqual([], self.faults({
            "low/a.h": '#include <vector>\n#include "low/b/c.h"\n',
            "high/a.cc": '#include "low/a.h"\n#include "absl/status/status.h"\n',
            "third_party/x.h": '#include "high/a.h"\n',
        }))

    def test_low_includes_high(self):
        self.assertEqual(
            ["low/sub/a.cc:3: low/ may not include high/b.h"],
            self.faults({"low/sub/a.cc": '// x\n\n  #  include "high/b.h"\n'}))

    def test_angle_brackets_do_not_hide_it(self):
        self.assertEqual(["low/a.cu:1: low/ may not include high/b.h"],
                         self.faults({"low/a.cu": "#include <high/b.h>\n"}))

    def test_neighbour_without_folder(self):
        self.assertEqual(
            ["low/a.cc:1: write a.h from the workspace's root"],
            self.faults({"low/a.cc": '#include "a.h"\n', "low/a.h": ""}))

    def test_unknown_folder(self):
        self.assertEqual(["new/a.cc: new/ is not in tools/layers.txt"],
                         self.faults({"new/a.cc": ""}))


class OnThisTree(unittest.TestCase):
    def setUp(self):
        # Bazel shows us links; the sources are where they lead.
        self.root = os.path.dirname(os.path.realpath("WORKSPACE"))
        self.layers = read_layers(os.path.join(self.root, "tools/layers.txt"))

    def test_sources_are_seen(self):
        self.assertIn("third_party", os.listdir(self.root))
        self.assertTrue(any(sources(self.root)))

    def test_includes(self):
        faults = check_tree(self.root, self.layers)
        self.assertEqual(0, len(faults), "\n" + "\n".join(faults))

    def test_bazel_has_the_same_layers(self):
        self.assertEqual(self.layers, read_bazel_layers(
            os.path.join(self.root, "tools/visibility/layers.bzl")))

    def test_every_layer_says_who_may_use_it(self):
        for layer in self.layers:
            build = os.path.join(self.root, layer, "BUILD")
            if os.path.exists(build):
                with open(build, encoding="utf-8") as file:
                    self.assertIn("default_visibility", file.read(), build)


if __name__ == "__main__":
    sys.exit(unittest.main(verbosity=2))
