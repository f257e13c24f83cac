"""The public headers, and their comments as Doxygen wants them.

Headers have plain comments (//) before what they describe, and behind it. `filtered`
turns those into /// and ///<, without changing a line's number of code; a comment
goes for all declarations that follow it without an empty line. `undescribed` names the
declarations that have none.

A header is read by statements: what lies in a namespace, a class or an enum is a
declaration, everything else in braces is skipped.
"""

import ast
import collections
import fnmatch
import os
import re
import sys

PACKER = "dist/pack_dist.py"  # its PUBLIC are the headers that a program includes
# What these include for their own sake: no name of it is one for users.
INTERNAL = ("base/layout/*", "base/monotonic.h", "checkpoint/exchange/safetensors_[fh]*",
            "comm/call_site.h", "verify/oracle*", "optim/algorithms/table.h")
INCLUDE = re.compile(r'^#include "([^"]+)"', re.MULTILINE)
SCOPE = re.compile(r"^\s*(template\s*<.*>\s*)?(inline\s+)?(namespace|class|struct|union|enum)\b")
# Nothing to describe: what is deleted or defaulted, destructors, other names of things.
PLAIN = re.compile(r"=\s*(delete|default)\b|^\s*~|\boverride\b|^\s*(virtual\s+)?~"
                   r"|^\s*(friend|using|static_assert|extern template|namespace\b.*=)"
                   r"|^\s*(class|struct|enum class|enum)\s+[\w:]+\s*(:\s*\w+)?\s*;"
                   r"|^\s*template\s*<[^;{]*>\s*(class|struct)\s+[\w:]+\s*;|operator=")

# What a name and a type say by themselves: data, enumerators, accessors,
# constructors of what is described, conversions.
OBVIOUS = re.compile(
    r"^(virtual |static |constexpr |inline |explicit )*(?:const )?[\w:<>, *&]+ \w+\(\) const( = 0;| \{.*|;)$"
    r"|^(?:\[\[.*?\]\] )?(?:static |inline |constexpr |const )*[\w:<>, *]+ \w+(\[\])?(\{\}| = .*|, \w+ = .*|(, \w+)*)?;$"
    r"|^k\w+( = \w+)?,?$|^(?:explicit )?(\w+)\((?:const )?[\w:<>]*\s?[&*]*\s?\w*\)( noexcept)?\s*[;:].*"
    r"|operator\[\]|^struct \{$")

# Left without a comment: (path, beginning of the declaration).
SELF_EXPLAINING = {
    ("engine/engine.h", "enum class Pass"),
    ("engine/plan/rates.h", "double Of(int64_t bytes)"),  # of RateLine
    ("checkpoint/exchange/name_map.h", "Name Theirs("),
    # With the options of the other, which is described.
    ("sharding/recompute/checkpointed/checkpointed.h", "template <typename Fn"),
}

Declaration = collections.namedtuple("Declaration", "line text scope described")


def shipped(root):
    """PUBLIC of the packer."""
    with open(os.path.join(root, PACKER), encoding="utf-8") as file:
        for node in ast.parse(file.read()).body:
            if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "PUBLIC":
                return ast.literal_eval(node.value)
    raise ValueError("no PUBLIC in " + PACKER)


def closure(root):
    """The paths of PUBLIC and of all of ours that they include, relative to root."""
    found, waiting = [], list(shipped(root))
    while waiting:
        path = waiting.pop(0)
        full = os.path.join(root, path)
        if path in found or not os.path.exists(full):  # libtorch's, generated
            continue
        found.append(path)
        with open(full, encoding="utf-8") as file:
            waiting += INCLUDE.findall(file.read())
    return found


def public(root):
    return [p for p in closure(root)
            if not any(fnmatch.fnmatchcase(p, pattern) for pattern in INTERNAL)]


def without_strings(line):
    """The code of a line: no comment, nothing within quotes."""
    line = re.sub(r'"(?:[^"\\]|\\.)*"|\'(?:[^\'\\]|\\.)*\'', '""', line)
    return line.split("//")[0]


class Reader:
    """Goes through a header by statements; marks which comment goes with what."""

    def __init__(self, text):
        self.lines = text.split("\n")
        self.comment_of = {}    # line of a declaration: lines of its comment
        self.declarations = []
        self.scopes = []        # of each open brace: (kind, name, is it public)
        self.head = self.read_head()
        self.read()

    def read_head(self):
        """How many lines the comment at the beginning has."""
        count = 0
        while count < len(self.lines) and self.lines[count].startswith("//"):
            count += 1
        return count

    def read(self):
        comment, group, start, statement = [], None, None, ""
        number = self.head
        while number < len(self.lines):
            line = self.lines[number]
            code = without_strings(line)
            bare = line.strip()
            if start is None and bare.startswith("//"):
                comment.append(number)
            elif start is None and not bare:
                comment, group = [], None
            elif start is None and bare.startswith("#"):
                number = self.end_of_directive(number)
                comment, group = [], None
            elif start is None and re.match(r"(public|private|protected):", bare):
                self.scopes[-1][2] = bare.startswith("public")
                comment, group = [], None
            elif start is None and re.fullmatch(r"(\}\s*\w*\s*;?\s*)+", code.strip()):
                self.close(code)
                comment, group = [], None
            else:
                if start is None:
                    start, statement = number, ""
                    if comment:
                        group = comment
                statement += code + "\n"
                end = self.end_of_statement(statement, number)
                if end is not None:
                    number, opened = end
                    self.declare(start, statement, group)
                    if opened:
                        self.open(statement)
                        group = None
                    start, comment = None, []
            number += 1

    def end_of_directive(self, number):
        while self.lines[number].endswith("\\"):
            number += 1
        return number

    def in_enum(self):
        return bool(self.scopes) and self.scopes[-1][0] == "enum"

    def end_of_statement(self, statement, number):
        """(last line, whether a scope is opened), or None if it goes on."""
        depth = 0
        for i, char in enumerate(statement):
            depth += char in "(["
            depth -= char in ")]"
            if depth:
                continue
            if char == ";" or (char == "," and self.in_enum()):
                return number, False
            if char == "{":
                rest = statement[i:]
                if SCOPE.match(statement[:i]) and "}" not in rest:
                    return number, True
                return self.skip_braces(number, rest)
            if char == "}":
                return number, False
        if self.in_enum() and not depth and number + 1 < len(self.lines) \
                and self.lines[number + 1].strip().startswith("}"):
            return number, False
        return None

    def skip_braces(self, number, rest):
        """The end of a body that begins on this line, and of its statement."""
        depth = rest.count("{") - rest.count("}")
        tail = rest
        while depth > 0:
            number += 1
            tail = without_strings(self.lines[number])
            depth += tail.count("{") - tail.count("}")
        # `T x{...};`, `int a[] = {...},` and initializers go on to their end.
        while tail.rstrip().endswith(",") and not self.in_enum() or (
                tail.count("(") > tail.count(")") and tail.rstrip()[-1:] not in ";}"):
            number += 1
            tail = without_strings(self.lines[number])
        return number, False

    def open(self, statement):
        match = SCOPE.match(statement)
        name = re.search(r"(?:namespace|class|struct|union|enum)(?:\s+class)?\s+(?:\[\[.*?\]\]\s*)?([\w:]*)",
                         statement[match.start(3):])[1]
        self.scopes.append([match[3], name, match[3] != "class"])

    def close(self, code):
        for _ in range(code.count("}")):
            self.scopes.pop()

    def visible(self):
        return all(is_public and "internal" not in name
                   for _, name, is_public in self.scopes) and bool(self.scopes)

    def declare(self, start, statement, group):
        head = statement.strip()
        if not head or head.startswith("}") or re.match(r"(inline )?namespace\b", head):
            return
        if group:
            self.comment_of[start] = group
        trailing = "//" in re.sub(r'"(?:[^"\\]|\\.)*"', '""', self.lines[start])
        if self.visible() and not PLAIN.search(head) and "ABSL_" not in head[:5]:
            scope = "::".join(name for _, name, _ in self.scopes if name)
            self.declarations.append(Declaration(
                start + 1, " ".join(head.split())[:90], scope, bool(group) or trailing))


def undescribed(text, path=""):
    """The public declarations that neither a comment nor their name describes.

    The comment at a header's beginning is that of its first class without one, and
    a class of options or results is described by its members.
    """
    reader = Reader(text)
    left = [d for d in reader.declarations
            if not d.described and not OBVIOUS.search(d.text)
            and not any(path == p and d.text.startswith(begin) for p, begin in SELF_EXPLAINING)]
    classes = [d for d in left if SCOPE.match(d.text)]
    spoken_for = set(classes[:1]) if reader.head else set()
    for one in classes:
        name = re.search(r"(\w+)\s*(?:final\s*)?(?::.*)?\{", one.text)
        members = [d for d in reader.declarations if name and d.scope.endswith("::" + name[1])]
        if any(d.described for d in members):
            spoken_for.add(one)
    return [d for d in left if d not in spoken_for]


def escaped(text):
    """Text for Doxygen: no commands, tags or links except our own."""
    parts = re.split(r"(`[^`]*`)", text)
    for i in range(0, len(parts), 2):
        parts[i] = re.sub(r"([\\@<>#%&$])", r"\\\1", parts[i]).replace("--", "\\--")
    return "".join(parts)


def described(lines, mark="///"):
    """Lines of a comment for Doxygen; those set in by three or more stay as they are."""
    result, verbatim = [], False
    for line in lines:
        text = re.sub(r"^\s*//", "", line)
        set_in = re.match(r" {3,}\S", text) is not None
        if set_in and not verbatim:
            result.append(mark + " @verbatim")
        elif verbatim and not set_in and text.strip():
            result.append(mark + " @endverbatim")
        if text.strip():
            verbatim = set_in
        result.append(mark + (text if set_in else escaped(text)))
    if verbatim:
        result.append(mark + " @endverbatim")
    return result


def behind(lines, number):
    """A line with its comment behind the code as ///<."""
    match = re.match(r'^((?:[^"/]|"(?:[^"\\]|\\.)*"|/(?!/))*?\S)(\s+)//(.*)$', lines[number])
    if not match:
        return lines[number]
    return "%s%s///<%s" % (match[1], match[2], escaped(match[3]))


def filtered(text):
    """The header with Doxygen's comments."""
    reader = Reader(text)
    lines, out = reader.lines, []
    head = lines[:reader.head]
    if head:
        out += ["/// @file"] + described(head)
    comments = {n for group in reader.comment_of.values() for n in group}
    # The first class without a comment has the one of the header.
    plain = next((d.line - 1 for d in reader.declarations
                  if SCOPE.match(d.text) and d.line - 1 not in reader.comment_of), None)
    starts = {d.line - 1 for d in reader.declarations} | set(reader.comment_of)
    for number in range(reader.head, len(lines)):
        if number in comments:
            continue
        if number in reader.comment_of:
            out += described([lines[n] for n in reader.comment_of[number]])
        elif number == plain and head:
            out += described(head)
        if re.search(r"=\s*delete;", lines[number]):
            out.append("")  # says nothing to a user
        else:
            out.append(behind(lines, number) if number in starts else lines[number])
    return "\n".join(out)


if __name__ == "__main__":
    if len(sys.argv) == 2:  # Doxygen's INPUT_FILTER
        with open(sys.argv[1], encoding="utf-8") as file:
            sys.stdout.write(filtered(file.read()))
    else:
        print("\n".join(public(".")))
