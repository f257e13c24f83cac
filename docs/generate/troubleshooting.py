#!/usr/bin/python3
"""Writes docs/troubleshooting.md: every message, by family, and what to do.

The messages are the code's own (messages.py), the families and remedies are in
troubleshooting.toml. `docs/generate/update` calls it.
"""

import ast
import collections
import fnmatch
import os
import re
import sys
import tomllib

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import messages  # noqa: E402

NOTES = "docs/generate/troubleshooting.toml"
PAGE = "docs/troubleshooting.md"
LABELS = {"piece": "part", "exception": "thrown", "Status": "cause's"}


def fits(message, rule):
    """Does a rule of the notes name the message?"""
    if "kinds" in rule and message.kind not in rule["kinds"]:
        return False
    def among(patterns):
        return any(fnmatch.fnmatchcase(message.path, p) for p in patterns)
    if not among(rule.get("files", ["*"])) or among(rule.get("not_files", [])):
        return False
    return "match" not in rule or re.search(rule["match"], message.text) is not None


def script_messages(root, path):
    """What a script ends with: `die "..."`, fail("..."), FATAL_ERROR, raise."""
    with open(os.path.join(root, path), encoding="utf-8") as file:
        text = file.read()
    found = []
    if path.endswith(".py"):
        found = python_texts(ast.parse(text))
    elif path.endswith(".bzl"):
        found = [python_text(node.args[0]) for node in ast.walk(ast.parse(text))
                 if isinstance(node, ast.Call) and node.args
                 and getattr(node.func, "id", "") == "fail"]
    elif path.endswith(".cmake"):
        found = [" ".join(re.findall(r'"((?:[^"\\]|\\.)*)"', m[1])) for m in re.finditer(
            r"(?:_NOT_FOUND_MESSAGE|FATAL_ERROR|WARNING)((?:\s+\"(?:[^\"\\]|\\.)*\")+)", text)]
    else:
        found = shell_texts(text)
    kept = [messages.tidy(re.sub(r"\$\{[^}]*\}", messages.HOLE, t)) for t in found]
    return [messages.Message(t, "ends", path) for t in dict.fromkeys(kept)
            if re.search("[A-Za-z]{2}", t)]


def shell_texts(text):
    """The arguments of `die`, and of `echo ... >&2`."""
    text = re.sub(r"\$\((?:[^()]|\([^()]*\))*\)", messages.HOLE, text)
    text = re.sub(r"\$\{[^}]*\}|\$\w+|\$[@*#?]", messages.HOLE, text)
    word = r"((?:[ \t]+(?:\\\n\s*)?\"(?:[^\"\\]|\\.)*\")+)"
    found = re.findall(r"\bdie" + word, text)
    found += re.findall(r"\becho" + word + r"[ \t]*>&2", text)
    return [" ".join(re.findall(r'"((?:[^"\\]|\\.)*)"', one)).replace('\\"', '"')
            for one in found]


def python_texts(tree):
    """The texts of exceptions that are raised, of sys.exit and need(condition, what)."""
    found = []
    for node in ast.walk(tree):
        call = node.exc if isinstance(node, ast.Raise) else node
        if not isinstance(call, ast.Call) or not call.args:
            continue
        if isinstance(node, ast.Raise) or getattr(call.func, "attr", "") == "exit":
            found.append(python_text(call.args[0]))
        elif getattr(call.func, "id", "") == "need":
            found.append(python_text(call.args[1]))
    return found


def python_text(node):
    """The pattern of one expression of Python or Starlark."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(python_text(value) for value in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return python_text(node.left) + python_text(node.right)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod):
        return re.sub(r"%[-+ #0]*[\d*]*(?:\.[\d*]+)?[a-z]", messages.HOLE,
                      python_text(node.left))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) \
            and node.func.attr == "format":
        return re.sub(r"\{[^}]*\}", messages.HOLE, python_text(node.func.value))
    return messages.HOLE


def assign(found, notes):
    """Returns {id of a family: its messages}, and what is wrong with the notes."""
    families = [f for chapter in notes["chapter"] for f in chapter["family"]]
    members = collections.defaultdict(list)
    used, faults = set(), []
    for message in found:
        left_out = next((r for r in notes["left_out"] if fits(message, r)), None)
        if left_out is not None:
            used.add(id(left_out))
            continue
        family = next((f for f in families if "scripts" not in f and fits(message, f)), None)
        if family is None:
            faults.append("%s: no family for: %s" % (message.path, message.text))
        else:
            members[id(family)].append(message)
    for rule in notes["left_out"]:
        if id(rule) not in used:
            faults.append("left_out names no message: " + rule["why"])
    for family in families:
        if "scripts" not in family and not members[id(family)]:
            faults.append("family without messages: " + family["title"])
    return members, faults


def quoted(text):
    return "`` %s ``" % text if "`" in text else "`%s`" % text


def items(family_messages, remedies, used):
    """The lines of one family, a message once, with all files that say it."""
    places = collections.OrderedDict()
    for message in family_messages:
        label = LABELS.get(message.kind, message.kind.replace("log ", ""))
        places.setdefault((message.text, label), []).append(message.path)
    for (text, label), paths in places.items():
        yield "- %s — %s%s" % (
            quoted(text), "" if label == "ends" else label + ", ", ", ".join(paths))
        for remedy in remedies:
            if re.search(remedy["match"], text):
                used.add(id(remedy))
                yield "  → " + remedy["say"]


def frequent(rows, found, faults):
    """The table of the messages that are met most often."""
    lines = ["", "## Met most often", "", "| words | what to do |", "|---|---|"]
    for row in rows:
        if not any(row["words"] in message.text for message in found):
            faults.append("no message has the words: " + row["words"])
        note = " (%s)" % row["note"] if "note" in row else ""
        lines.append("| `%s`%s | %s |" % (row["words"], note, row["say"]))
    return lines


def page(root):
    """Returns the page and the faults of its sources."""
    with open(os.path.join(root, NOTES), "rb") as file:
        notes = tomllib.load(file)
    found = messages.all_messages(root)
    members, faults = assign(found, notes)
    lines = ["# Troubleshooting", "",
             "<!-- Written by docs/generate/update out of the sources and of",
             "     %s. -->" % NOTES, notes["head"].rstrip(), ""]
    titles = ["Met most often"] + [chapter["title"] for chapter in notes["chapter"]]
    lines += ["- [%s](#%s)" % (title, anchor(title)) for title in titles]
    lines += frequent(notes.get("frequent", []), found, faults)
    used, count = set(), 0
    for chapter in notes["chapter"]:
        lines += ["", "## " + chapter["title"]]
        lines += ["", chapter["text"].strip()] if "text" in chapter else []
        for family in chapter["family"]:
            own = members[id(family)]
            for script in family.get("scripts", []):
                said = script_messages(root, script)
                if not said:
                    faults.append("no messages found in " + script)
                own = own + said
            count += len(own)
            lines += ["", "### " + family["title"], "", family["text"].strip(), ""]
            lines += items(own, notes["remedy"], used)
    faults += ["remedy of no message: " + r["match"] for r in notes["remedy"]
               if id(r) not in used]
    return "\n".join(lines) + "\n", faults, count


def anchor(title):
    """GitHub's name of a heading."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def main():
    root = sys.argv[1] if len(sys.argv) > 1 else "."
    text, faults, count = page(root)
    for fault in faults:
        print(fault, file=sys.stderr)
    with open(os.path.join(root, PAGE), "w", encoding="utf-8") as file:
        file.write(text)
    print("%s: %d messages" % (PAGE, count))
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
