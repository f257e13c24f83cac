#!/usr/bin/python3
"""Writes several C++ source files as one: "Note [Joined sources]" in joined.bzl.

usage: join_sources.py OUT (--own-namespaces | --as-they-are) FILE=NAME...

Reads each FILE; NAME is what the compiler calls it.
"""

import os
import re
import sys

OPEN = "namespace {"
CLOSE = "}  // namespace"
# What may follow a file's unnamed namespace: only there is nothing that uses it.
NOTHING = re.compile(r"^(//.*|}  // namespace \w+|)$")


def with_own_namespace(name, lines):
    """Returns the lines, the unnamed namespaces within one of the file's name."""
    if CLOSE not in lines:
        return lines
    last = len(lines) - lines[::-1].index(CLOSE)
    if not all(NOTHING.match(line) for line in lines[last:]):
        return lines
    space = re.sub(r"\W", "_", os.path.basename(name).rsplit(".", 1)[0])
    changed = {OPEN: "namespace %s { %s" % (space, OPEN), CLOSE: "} " + CLOSE}
    return [changed.get(line, line) for line in lines]


def main():
    out, how, *files = sys.argv[1:]
    with open(out, "w", encoding="utf-8") as joined:
        for file in files:
            path, name = file.split("=")
            with open(path, encoding="utf-8") as source:
                lines = source.read().split("\n")
            if how == "--own-namespaces":
                lines = with_own_namespace(name, lines)
            joined.write('#line 1 "%s"\n%s\n' % (name, "\n".join(lines)))


if __name__ == "__main__":
    main()
