#!/usr/bin/python3
"""Does tools/test_summary.py count what happened?"""

import contextlib
import gzip
import io
import json
import os
import sys
import tempfile
import unittest

sys.path.insert(0, "tools")
import test_summary  # pylint: disable=wrong-import-position

GTEST = """<testsuites><testsuite name="A">
<testcase name="Good" status="run" result="completed"/>
<testcase name="NoGpu" status="run" result="skipped"><skipped/></testcase>
<testcase name="DISABLED_Off" status="notrun" result="suppressed"/>
%s</testsuite></testsuites>"""
GOOD = GTEST % ""
BAD = GTEST % '<testcase name="B" status="run"><failure/></testcase>'
# What Bazel writes for a test that writes no file of its own.
PLAIN = '<testsuites><testsuite><testcase name="t"/></testsuite></testsuites>'
CRASH = PLAIN.replace("/></tests", "><error/></testcase></tests")


class Run:
    """Builds the events of one run of bazel test."""

    def __init__(self, folder):
        self.folder = folder
        self.events = []
        self.profile = os.path.join(folder, "profile.gz")

    def result(self, label, status, xml=None, attempt=1):
        outputs = []
        if xml is not None:
            path = os.path.join(self.folder, "%d.xml" % len(self.events))
            with open(path, "w", encoding="utf-8") as file:
                file.write(xml)
            outputs = [{"name": "test.xml", "uri": "file://" + path}]
        self.events.append({
            "id": {"testResult": {"label": label, "run": 1, "shard": 1,
                                  "attempt": attempt}},
            "testResult": {"status": status, "testActionOutput": outputs}})

    def summary(self, label, status):
        self.events.append({"id": {"testSummary": {"label": label}},
                            "testSummary": {"overallStatus": status}})

    def trace(self, *events):
        """Of (category, name, begin, seconds) each, all on one thread."""
        with gzip.open(self.profile, "wt", encoding="utf-8") as file:
            json.dump({"traceEvents": [
                {"ph": "X", "tid": 1, "cat": category, "name": name,
                 "ts": begin * 1e6, "dur": seconds * 1e6}
                for category, name, begin, seconds in events]}, file)

    def end(self, *codes):
        """As if bazel had run as often as there are codes, each time so."""
        path = os.path.join(self.folder, "events.json")
        with open(path, "w", encoding="utf-8") as file:
            for event in self.events:
                file.write(json.dumps(event) + "\n")
            file.write('{"id": {"cut o')  # as if bazel had been killed
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            code = test_summary.main(
                [(path, code, self.profile) for code in codes])
        return code, output.getvalue()


class SummaryTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.bazel = Run(folder.name)

    def expect(self, code, line, *bazel_codes):
        self.assertEqual((code, line + "\n"), self.bazel.end(*bazel_codes))

    def test_all_good(self):
        self.bazel.result("//a", "PASSED", GOOD)
        self.bazel.summary("//a", "PASSED")
        self.bazel.result("//b", "PASSED", PLAIN)
        self.bazel.summary("//b", "PASSED")
        self.expect(0, "2 passed, 0 failed, 1 skipped", 0)

    def test_failed_case(self):
        self.bazel.result("//a", "FAILED", BAD)
        self.bazel.summary("//a", "FAILED")
        self.expect(1, "1 passed, 1 failed, 1 skipped", 3)

    def test_crash(self):
        self.bazel.result("//a", "FAILED", CRASH)
        self.bazel.summary("//a", "FAILED")
        self.expect(1, "0 passed, 1 failed", 3)

    def test_timeout_without_xml(self):
        self.bazel.result("//a", "TIMEOUT")
        self.bazel.summary("//a", "TIMEOUT")
        self.expect(1, "0 passed, 1 failed", 3)

    def test_cases_passed_but_program_failed(self):
        self.bazel.result("//a", "FAILED", PLAIN)
        self.bazel.summary("//a", "FAILED")
        self.expect(1, "1 passed, 1 failed", 3)

    def test_not_built(self):
        self.bazel.result("//a", "PASSED", PLAIN)
        self.bazel.summary("//a", "PASSED")
        self.bazel.summary("//b", "FAILED_TO_BUILD")
        self.expect(1, "1 passed, 1 failed", 1)

    def test_something_else_not_built(self):
        self.bazel.result("//a", "PASSED", PLAIN)
        self.bazel.summary("//a", "PASSED")
        self.expect(1, "1 passed, 1 failed", 1)

    def test_nothing_ran(self):
        self.expect(1, "0 passed, 1 failed", 0)

    def test_last_attempt_counts(self):
        self.bazel.result("//a", "FAILED", CRASH)
        self.bazel.result("//a", "PASSED", PLAIN, attempt=2)
        self.bazel.summary("//a", "FLAKY")
        self.expect(0, "1 passed, 0 failed", 0)

    def test_runs_are_added(self):
        self.bazel.result("//a", "PASSED", GOOD)
        self.bazel.summary("//a", "PASSED")
        self.expect(0, "2 passed, 0 failed, 2 skipped", 0, 0)

    def test_a_run_that_failed_among_others(self):
        self.bazel.result("//a", "PASSED", GOOD)
        self.bazel.summary("//a", "PASSED")
        self.expect(1, "2 passed, 1 failed, 2 skipped", 0, 1)

    def test_where_the_time_went(self):
        starts = GOOD.replace("<testsuites>", "<testsuites rank_pool_starts="
                              '"3" rank_pool_start_ms="4500">')
        self.bazel.result("//a", "PASSED", starts)
        self.bazel.summary("//a", "PASSED")
        self.bazel.result("//cached", "PASSED", starts)
        self.bazel.summary("//cached", "PASSED")
        self.bazel.trace(
            ("action processing", "Compiling a/b/c/d.cc", 0, 5),
            ("action resource lock", "Compiling a/b/c/d.cc", 1, 2),
            ("action processing", "Testing //a", 5, 7),
            ("action processing", "Linking a/a_test", 12, 1),
            ("action processing", "Compiling bazel-out/k8/bin/a/b/d.pb.cc", 13, 1),
            ("action processing", "Precompiling a/p/pch.h", 14, 2),
            ("action processing", "Writing file a/b", 16, 2),
            ("action resource lock", "of another thread", 20, 9))
        _, output = self.bazel.end(0)
        self.assertEqual("""\
                          actions  seconds   queued
compiling                       2        4        2
linking                         1        1        0
testing                         1        7        0
  starting ranks                3        4
seconds by room           compile     link     test   starts   queued
a                               0        1        7        3        0
a/b                             4        0        0        0        2
a/p                             2        0        0        0        0
slowest tests, seconds:
     7.0  //a
2 passed, 0 failed, 2 skipped
""", output)

    def test_rooms_that_cost_little_are_one_line(self):
        self.bazel.result("//a", "PASSED", GOOD)
        self.bazel.summary("//a", "PASSED")
        self.bazel.trace(*(
            ("action processing", "Compiling r%02d/a.cc" % i, 100 * i, i)
            for i in range(1, 31)))
        _, output = self.bazel.end(0)
        lines = output.splitlines()
        rooms = lines[lines.index(next(
            line for line in lines if line.startswith("seconds by room"))) + 1:-1]
        self.assertEqual(21, len(rooms))
        self.assertEqual(["r30", "30"], rooms[0].split()[:2])
        self.assertEqual(["10", "others", "55"], rooms[-1].split()[:3])


if __name__ == "__main__":
    unittest.main(verbosity=2)
