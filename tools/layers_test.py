#!/usr/bin/python3
"""Does every #include obey tools/layers.txt, does every room stay a room, what
programs include small, and the name of a class unique?

A folder that the file lists may include its own headers, those of its folders
that are not listed themselves, and those of the folders that its line names.
Reads all .h, .cc, .cu and .cuh files of the workspace.
"""

import ast
import os
import re
import sys
import tempfile
import unittest

SOURCES = (".h", ".cc", ".cu", ".cuh")
INCLUDE = re.compile(r'\s*#\s*include\s*([<"])([^">]+)[">]')
# What is skipped in a search for definitions, and what structures them.
TOKEN = re.compile(r"""
    //[^\n]* | /\*.*?\*/ | ^[ \t]*\#(?:\\\n|[^\n])*
    | R"(\w*)\(.*?\)\1" | "(?:\\.|[^"\\\n])*" | '(?:\\.|[^'\\\n])+'
    | [{};]""", re.DOTALL | re.MULTILINE | re.VERBOSE)
NAMESPACE = re.compile(r"\bnamespace\s*([\w:]*)\s*$")
CLASS = re.compile(r"""
    (?:^|[\s>]) (?:class | struct | union | enum(?:\s+(?:class|struct))?)
    \s+ (?:(?:alignas|ABSL_\w+)(?:\([^)]*\))?\s+ | \[\[[^]]*\]\]\s*)*
    ([\w:]+ (?:<[^{}]*>)?) \s* (?:final\s*)? (?::[^{}]*)? $""", re.DOTALL | re.VERBOSE)
# Folders of the workspace that are no layers.
OTHER = ("third_party", "docs", "shared")
# Of code in one folder, tests aside.
MAX_FILES = 25
# What a program includes; how many of our headers that may name, and reach. Its
# folder alone is a prefix that compilers search, so <> finds it.
PUBLIC = "tessera/tessera.h"
MAX_NAMED = 13
MAX_REACHED = 46


def read_layers(path):
    """Returns {folder: list of what its line allows}, in the file's order."""
    layers = {}
    with open(path, encoding="utf-8") as file:
        for line in file:
            line = line.split("#")[0].strip()
            if line:
                name, _, allowed = line.partition(":")
                layers[name.strip()] = allowed.split()
    return layers


def expand(word, layers):
    """Returns the folders that a word of a line stands for."""
    if not word.endswith("/..."):
        return [word]
    top = word[:-len("/...")]
    return [name for name in layers if name == top or name.startswith(top + "/")]


def room_of(path, layers):
    """Returns the listed folder that a file belongs to, or None.

    Where rooms of a folder are listed, each of its folders has to be.
    """
    folder = os.path.dirname(path)
    if folder in layers:
        return folder
    while folder:
        folder = os.path.dirname(folder)
        if folder in layers and not any(
                name.startswith(folder + "/") for name in layers):
            return folder
    return None


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
    room = room_of(path, layers)
    if room is None:
        yield "%s: %s/ is not in tools/layers.txt" % (
            path, os.path.dirname(path) or ".")
        return
    allowed = {room}.union(*(expand(word, layers) for word in layers[room]))
    tops = {name.split("/")[0] for name in layers}
    with open(os.path.join(root, path), encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            match = INCLUDE.match(line)
            if not match:
                continue
            quote, header = match.groups()
            where = "%s:%d: " % (path, number)
            if header.split("/")[0] in tops and "/" in header:
                if room_of(header, layers) not in allowed:
                    yield where + "%s/ may not include %s" % (room, header)
                elif quote == "<" and header.split("/")[0] != PUBLIC.split("/")[0]:
                    yield where + 'write #include "%s"' % header
            elif quote == '"' and (header.startswith("../") or os.path.exists(
                    os.path.join(root, os.path.dirname(path), header))):
                yield where + "write %s from the workspace's root" % header


def check_order(layers):
    """Yields a line for each folder that is allowed before it is listed."""
    above = set()
    for name, words in layers.items():
        for word in words:
            others = expand(word, layers)
            if not others or not set(others) <= layers.keys():
                yield "layers.txt: %s: there is no %s" % (name, word)
            elif not set(others) - {name} <= above:
                yield "layers.txt: %s: %s is not below it" % (name, word)
        above.add(name)


def check_folders(layers):
    """Yields a line for each top folder whose rooms lie above and below another's."""
    below = {}
    for name, words in layers.items():
        for word in words:
            for other in expand(word, layers):
                below.setdefault(name.split("/")[0], set()).add(other.split("/")[0])

    def reached(top):
        seen, left = set(), [top]
        while left:
            new = below.get(left.pop(), set()) - seen - {top}
            seen |= new
            left.extend(new)
        return seen
    for top in below:
        for other in sorted(reached(top)):
            if top < other and top in reached(other):
                yield "layers.txt: %s is above and below %s" % (top, other)


def check_sizes(root, layers):
    """Yields a line for each room with too many files."""
    files = {}
    for path in sources(root):
        if not re.search(r"_(test|fuzz)\.", path):
            files.setdefault(os.path.dirname(path), []).append(path)
    for folder, paths in sorted(files.items()):
        if len(paths) > MAX_FILES:
            yield "%s: %d files are more than one room (%d)" % (
                folder, len(paths), MAX_FILES)


def headers_named(root, path, tops):
    """Returns our headers that a file includes itself, those made by Bazel too."""
    full = os.path.join(root, path)
    if not os.path.exists(full):
        return []
    with open(full, encoding="utf-8") as file:
        found = filter(None, map(INCLUDE.match, file))
        return [m.group(2) for m in found if m.group(2).split("/")[0] in tops]


def check_reach(root, layers, path, named, reached):
    """Yields a line if a header includes more of ours than it may."""
    tops = {name.split("/")[0] for name in layers}
    own = headers_named(root, path, tops)
    if len(own) > named:
        yield "%s names %d headers of ours (%d)" % (path, len(own), named)
    seen, left = set(), own
    while left:
        header = left.pop()
        if header not in seen:
            seen.add(header)
            left.extend(headers_named(root, header, tops))
    if len(seen) > reached:
        yield "%s reaches %d headers of ours (%d): %s" % (
            path, len(seen), reached, " ".join(sorted(seen)))


def classes_of(text):
    """Yields the qualified names of classes and enums that a file defines.

    Those in an anonymous namespace or a function are not seen from other files.
    """
    scopes, head, end = [], "", 0
    for match in TOKEN.finditer(text):
        token = match.group()
        head += text[end:match.start()]
        end = match.end()
        if token not in "{};":
            continue
        if token == "}" and scopes:
            scopes.pop()
        elif token == "{":
            space, kind = NAMESPACE.search(head), CLASS.search(head)
            name = space.group(1) if space else kind.group(1) if kind else None
            scopes.append(name and re.sub(r"\s+", "", name))
            if kind and all(scopes):
                yield "::".join(scopes)
        head = ""


def check_definitions(root):
    """Yields a line for each class of namespace tessera that two files define.

    A program that has both takes the functions of either one, without a word of
    the compiler or the linker.
    """
    files = {}
    for path in sources(root):
        with open(os.path.join(root, path), encoding="utf-8") as file:
            for name in set(classes_of(file.read())):
                files.setdefault(name, []).append(path)
    for name, paths in sorted(files.items()):
        if name.startswith("tessera::") and len(paths) > 1:
            yield "%s is defined in %s" % (name, " and ".join(paths))


def check_tree(root, layers):
    faults = list(check_order(layers)) + list(check_folders(layers))
    faults += check_sizes(root, layers)
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
            return check_tree(root, {
                "low": [], "rooms": ["low"], "rooms/a": [], "rooms/b": ["rooms"],
                "high": ["low", "rooms/..."]})

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

    def test_a_programs_header_in_angle_brackets(self):
        with tempfile.TemporaryDirectory() as root:
            with open(os.path.join(root, "a.cc"), "w", encoding="utf-8") as file:
                file.write("#include <tessera/a.h>\n#include <low/a.h>\n")
            faults = check_file(root, "a.cc", {"": ["tessera", "low"], "tessera": [], "low": []})
            self.assertEqual(['a.cc:2: write #include "low/a.h"'], list(faults))

    def test_neighbour_without_folder(self):
        self.assertEqual(
            ["low/a.cc:1: write a.h from the workspace's root"],
            self.faults({"low/a.cc": '#include "a.h"\n', "low/a.h": ""}))

    def test_unknown_folder(self):
        self.assertEqual(["new/a.cc: new/ is not in tools/layers.txt"],
                         self.faults({"new/a.cc": ""}))

    def test_rooms(self):
        self.assertEqual([], self.faults({
            "rooms/b/x.cc": '#include "rooms/y.h"\n',
            "high/sub/x.cc": '#include "rooms/a/x.h"\n'}))
        self.assertEqual(
            ["rooms/b/x.cc:1: rooms/b/ may not include rooms/a/x.h"],
            self.faults({"rooms/b/x.cc": '#include "rooms/a/x.h"\n'}))
        self.assertEqual(
            ["rooms/y.cc:1: rooms/ may not include rooms/a/x.h"],
            self.faults({"rooms/y.cc": '#include "rooms/a/x.h"\n'}))

    def test_room_that_is_not_listed(self):
        self.assertEqual(["rooms/new/x.cc: rooms/new/ is not in tools/layers.txt"],
                         self.faults({"rooms/new/x.cc": ""}))

    def test_order(self):
        self.assertEqual(
            ["layers.txt: a: b is not below it", "layers.txt: b: there is no c"],
            list(check_order({"a": ["b"], "b": ["a", "c"]})))

    def test_above_and_below(self):
        self.assertEqual(
            ["layers.txt: a is above and below b"],
            list(check_folders({"a/x": [], "b": ["a/x"], "a/y": ["b"]})))

    def test_too_many_files(self):
        files = {"low/f%d.h" % i: "" for i in range(MAX_FILES)}
        files["low/f_test.cc"] = ""
        self.assertEqual([], self.faults(files))
        files["low/more.cc"] = ""
        self.assertEqual(["low: 26 files are more than one room (25)"],
                         self.faults(files))

    def test_two_classes_of_one_name(self):
        both = "namespace tessera {\n%s\n}  // namespace tessera\n"
        own = both % "namespace {\nclass B { int b; };\n}  // namespace"
        files = {
            "low/a.h": both % "class A;\nenum class E { kA };\n"
                              "template <typename T>\nstruct S<T, int> : A { T t; };",
            "low/b.cc": both % "// class A {\nstruct A::Part { int a; };\n"
                               "int F() { struct A { int a; }; return 0; }",
            "low/c.cc": own, "low/d.cc": own}
        with tempfile.TemporaryDirectory() as root:
            def faults():
                for path, text in files.items():
                    path = os.path.join(root, path)
                    os.makedirs(os.path.dirname(path), exist_ok=True)
                    with open(path, "w", encoding="utf-8") as file:
                        file.write(text)
                return list(check_definitions(root))
            self.assertEqual([], faults())
            files["low/c.cc"] = both % (
                "class ABSL_LOCKABLE E final : public A {\n};\n"
                "struct S<T, int> { char brace = '{'; };\nstruct A { struct Part {}; };")
            self.assertEqual(
                ["tessera::%s is defined in low/%s and low/c.cc" % fault for fault in (
                    ("A::Part", "b.cc"), ("E", "a.h"), ("S<T,int>", "a.h"))], faults())

    def test_headers_for_programs(self):
        files = {"high/api.h": '#include "low/a.h"\n#include <vector>\n',
                 "low/a.h": '#include "low/b.h"\n#include "absl/a.h"\n',
                 "low/b.h": '#include "low/a.h"\n#include "low/made.pb.h"\n'}
        with tempfile.TemporaryDirectory() as root:
            for path, text in files.items():
                os.makedirs(os.path.join(root, os.path.dirname(path)), exist_ok=True)
                with open(os.path.join(root, path), "w", encoding="utf-8") as file:
                    file.write(text)
            check = lambda *most: list(check_reach(
                root, {"low": [], "high": []}, "high/api.h", *most))
            self.assertEqual([], check(1, 3))
            self.assertEqual(["high/api.h names 1 headers of ours (0)",
                              "high/api.h reaches 3 headers of ours (2): "
                              "low/a.h low/b.h low/made.pb.h"], check(0, 2))


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

    def test_one_definition(self):
        faults = list(check_definitions(self.root))
        self.assertEqual(0, len(faults), "\n" + "\n".join(faults))

    def test_headers_for_programs(self):
        faults = list(check_reach(self.root, self.layers, PUBLIC, MAX_NAMED, MAX_REACHED))
        self.assertEqual([], faults)

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
