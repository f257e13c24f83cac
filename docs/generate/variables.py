"""The environment variables that the tree reads: extracted, and documented.

docs/environment.md is written by hand; docs_test.py compares its tables with what is
found here. In C++ each string that looks like a variable's name (with an underscore, or
where one is read) counts, unless NO_VARIABLES has it; in scripts what they read.
"""

import os
import re
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import messages  # noqa: E402

PAGE = "docs/environment.md"
NAME = re.compile(r"[A-Z][A-Z0-9]+(_[A-Za-z0-9]+)*_?")
# Of names with an underscore those that are none: dtypes, what a name begins with, a
# key of others' configurations.
NO_VARIABLES = re.compile(r"F8_E\w+|T_0|NCCL_|CUDA_VISIBLE_DEVICES")
# What reads a variable: one without an underscore counts only there.
READERS = re.compile(r"getenv|Env[A-Z]\w+|has")
SCRIPTS = ("demo", "check", "tools/setup", "tools/find_libtorch", "tools/compile_commands",
           "bundle/run", "benchmarks/peers", "benchmarks/offload", ".ci/run")
# Set within the scripts themselves, or by the shell.
OF_SHELLS = {"SECONDS", "BASH_SOURCE", "LINENO", "BASH_COMMAND", "EUID", "ID",
             "VERSION_ID", "PRETTY_NAME", "PWD"}
# Of tests, those that a person may set; others they set for their own processes.
OF_TESTS = {"TESSERA_TEST_SEED": "tests/fuzz/fuzz_test.cc",
            "TESSERA_DS_CONFIGS": "config/ds_configs_test.cc",
            "TESSERA_PYTHON": "tests/checkpoint/transformers_test.cc"}


def read(root, path):
    with open(os.path.join(root, path), encoding="utf-8") as file:
        return file.read()


def of_sources(root):
    """Variables in the strings of the library and its programs."""
    found = {}
    for path in messages.sources(root):
        tokens = messages.tokens_of(os.path.join(root, path))
        for i, token in enumerate(tokens):
            if token.kind != "string" or not NAME.fullmatch(token.text):
                continue
            is_read = i > 1 and tokens[i - 1].text == "(" \
                and READERS.fullmatch(tokens[i - 2].text)
            if is_read or ("_" in token.text and not NO_VARIABLES.fullmatch(token.text)):
                found.setdefault(token.text, path)
    return found


def of_tests(root):
    """OF_TESTS, as far as their readers are there and read them."""
    return {name: path for name, path in OF_TESTS.items()
            if '"%s"' % name in read(root, path)}


def of_scripts(root):
    """Those that shell scripts, Python and Starlark read."""
    found = {}
    for path in SCRIPTS:
        text = read(root, path)
        own = set(re.findall(r"(?m)(?:^|[\s(;])(?:readonly |local |export )?(\w+)=", text))
        for name in re.findall(r"\$\{([A-Z][A-Z0-9_]+)[:}]", text):
            if name not in OF_SHELLS and (name not in own or ":-" in text):
                found.setdefault(name, path)
    for top in ("third_party", "tools", "benchmarks", "bundle"):
        for folder, folders, files in os.walk(os.path.join(root, top)):
            folders[:] = [f for f in folders if f != "testdata"]
            for name in files:
                path = os.path.relpath(os.path.join(folder, name), root)
                if name.endswith((".py", ".bzl")) and not name.endswith("_test.py"):
                    for variable in of_python(read(root, path)):
                        found.setdefault(variable, path)
    return found


def of_python(text):
    found = re.findall(
        r"""(?:environ|\benv)(?:\.get\(|\.setdefault\(|\[)['"]([A-Z][A-Z0-9_]+)['"]""", text)
    for block in re.findall(r"environ = \[([^\]]*)\]", text):
        found += re.findall(r'"([A-Z_0-9]+)"', block)
    return found


def all_variables(root):
    """{name: a file that reads it}"""
    return {**of_tests(root), **of_scripts(root), **of_sources(root)}


def documented(text):
    """The names in the first columns of the page's tables."""
    return {name for row in re.findall(r"(?m)^\|([^|]*)\|", text)
            for name in re.findall(r"`([A-Z][A-Za-z0-9_]*)`", row)
            if name != "NCCL_"}


if __name__ == "__main__":
    for name, path in sorted(all_variables(".").items()):
        print("%-32s %s" % (name, path))
