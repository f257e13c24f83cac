#!/usr/bin/python3
"""Are the texts that users read free of the turns of phrase in docs/phrases.txt?

Looked at are

  pages     every .md file, and docs/generate/troubleshooting.toml
            (docs/troubleshooting.md is made of it and of the messages)
  literals  the strings of all C++ sources except tests: messages and help texts
  comments  of the public headers, of the examples and of .proto files

Code in pages is left out, and so are words in quotes that a page explains.

usage: phrases_test.py            in the root of the tree
       phrases_test.py --list     prints what it finds
"""

import bisect
import os
import re
import sys
import unittest

# Bazel shows us links; the sources are where they lead.
ROOT = os.path.dirname(os.path.realpath("WORKSPACE"))
sys.path.insert(0, os.path.join(ROOT, "docs/generate"))
import links  # noqa: E402
import messages  # noqa: E402
import public_headers  # noqa: E402

sys.path.insert(0, os.path.join(ROOT, "docs"))
import mutant_report  # noqa: E402

PHRASES = "docs/phrases.txt"
NOTES = "docs/generate/troubleshooting.toml"
# Pages that programs make of texts which are looked at, or of measurements.
MADE = ("docs/troubleshooting.md", "benchmarks/results/")


class Text:
    """A run of prose, and the line in its file of each of its characters."""

    def __init__(self):
        self.words, self.starts, self.lines = "", [], []

    def add(self, words, line):
        self.starts.append(len(self.words))
        self.lines.append(line)
        self.words += words.strip() + " "

    def line_at(self, place):
        return self.lines[bisect.bisect_right(self.starts, place) - 1]


def phrases(text):
    """[(pattern, what to write instead)] of the file's text."""
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        pattern, arrow, instead = line.partition(" -> ")
        if not arrow or not instead.strip():
            raise SystemExit("%s:%d: expected PATTERN -> INSTEAD" % (PHRASES, number))
        found.append((re.compile(pattern, re.IGNORECASE), instead))
    return found


def of_page(text):
    """A Text for each paragraph, table row and list item of Markdown, without code."""
    blank = lambda match: re.sub(r"[^\n]", " ", match[0])  # noqa: E731
    text = re.sub(r"(?ms)^[ ]*```.*?^[ ]*```", blank, text)
    text = re.sub(r"(`+)(?!`)[^\n]*?(?<!`)\1(?!`)", lambda m: "X" * len(m[0]), text)
    current = None
    for number, line in enumerate(text.splitlines(), 1):
        begins = re.match(r"\s*(?:[-*|#>]|\d+\. )", line)
        if current and (begins or not line.strip()):
            yield current
            current = None
        for cell in line.split("|") if line.startswith("|") else [line]:
            if line.startswith("|"):
                row = Text()
                row.add(cell, number)
                yield row
            elif cell.strip():
                current = current or Text()
                current.add(re.sub(r"^\s*(?:[-*>]+|\d+\.) ", "", cell), number)
    if current:
        yield current


def of_comments(text):
    """A Text for each comment, whole lines or behind code."""
    current = None
    for number, line in enumerate(text.splitlines(), 1):
        whole = re.match(r"\s*//+ ?(.*)", line)
        behind = None if whole else re.search(r"[;,{})\]] +// (.*)", line)
        if current and not (whole and whole[1].strip()):
            yield current
            current = None
        if whole and whole[1].strip():
            current = current or Text()
            current.add(whole[1], number)
        elif behind:
            alone = Text()
            alone.add(behind[1], number)
            yield alone
    if current:
        yield current


def of_literals(source):
    """A Text for each string of C++, adjacent ones joined."""
    current, at, line = None, 0, 1
    for match in messages.TOKEN.finditer(source):
        line += source.count("\n", at, match.start())
        at = match.start()
        if match["space"] is not None:
            continue
        if match["raw"] is not None or match["string"] is not None:
            current = current or Text()
            words = match["rawtext"] if match["raw"] is not None else \
                messages.unescape(match["string"])
            current.starts.append(len(current.words))
            current.lines.append(line)
            current.words += words
        elif current:
            yield current
            current = None
    if current:
        yield current


def texts(root):
    """Yields (path, Text) of all that users read."""
    def read(path):
        with open(os.path.join(root, path), encoding="utf-8") as file:
            return file.read()
    for path in [*links.pages(root), NOTES]:
        if not path.startswith(MADE):
            yield from ((path, text) for text in of_page(read(path)))
    sources = messages.sources(root)
    for path in sources:
        yield from ((path, text) for text in of_literals(read(path)))
    commented = set(public_headers.public(root))
    commented.update(path for path in sources if path.startswith("examples/"))
    for folder, folders, files in os.walk(root):
        folders[:] = [f for f in folders if not f.startswith((".", "bazel-", "third_party"))]
        commented.update(os.path.relpath(os.path.join(folder, name), root)
                         for name in files if name.endswith(".proto"))
    for path in sorted(commented):
        yield from ((path, text) for text in of_comments(read(path)))


def found_in(text, known):
    """Yields (line, words, instead)."""
    for pattern, instead in known:
        for match in pattern.finditer(text.words):
            yield text.line_at(match.start()), match[0].strip(), instead


def found(root):
    with open(os.path.join(root, PHRASES), encoding="utf-8") as file:
        known = phrases(file.read())
    for path, text in texts(root):
        for line, words, instead in found_in(text, known):
            yield '%s:%d: "%s": write: %s' % (path, line, words, instead)


class PhrasesTest(unittest.TestCase):

    def test_none_is_there(self):
        faults = sorted(set(found(ROOT)))
        self.assertEqual(0, len(faults), "\n" + "\n".join(faults))

    def test_all_kinds_of_texts_are_read(self):
        paths = {path for path, _ in texts(ROOT)}
        for path in ("README.md", "docs/guide.md", "config/config.proto", NOTES,
                     "engine/engine.h", "examples/minimal/minimal.cc", "tools/doctor.cc"):
            self.assertIn(path, paths)

    def check(self, made, *expected):
        known = [(re.compile(r"\bbut for\b", re.IGNORECASE), "except"),
                 (re.compile(r"(?:^|[.] )(?-i:Of) ", re.IGNORECASE), "the subject")]
        got = [(line, words) for text in made for line, words, _ in found_in(text, known)]
        self.assertEqual(list(expected), got)

    def test_pages(self):
        self.check(of_page("all but\nfor one\n\n| a | Of it |\n`but for`\n```\nbut for\n```\n"
                           "- a\n  b. Of all\nof it"),
                   (1, "but for"), (4, "Of"), (10, ". Of"))

    def test_comments(self):
        self.check(of_comments("// all but\n// for one\nint a;  // Of it\nint of;\n"
                               "// a b\n//\n// Of a\n"),
                   (1, "but for"), (3, "Of"), (7, "Of"))

    def test_literals(self):
        self.check(of_literals('F("all but "\n  "for one"); // but for\n G("Of it", R"(\nbut for)");'),
                   (1, "but for"), (3, "Of"), (3, "but for"))


if __name__ == "__main__":
    if "--list" in sys.argv:
        print("\n".join(sorted(set(found(ROOT)))))
    else:
        sys.exit(mutant_report.main())
