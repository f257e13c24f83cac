"""Runs a file's unit tests, with the filter and the report that tests/mutants/run reads.

Bazel gives the filter of --test_filter as TESTBRIDGE_TEST_ONLY ("A.test_b:C.*") and
the place of the report as XML_OUTPUT_FILE. The report is as googletest writes it.
"""

import fnmatch
import os
import unittest
import xml.sax.saxutils


def name_of(test):
    """"NamesTest.test_names", of a subtest, too."""
    return ".".join(getattr(test, "test_case", test).id().split(".")[-2:])


def selected(suite, patterns):
    for test in suite:
        if isinstance(test, unittest.TestSuite):
            yield from selected(test, patterns)
        elif any(fnmatch.fnmatchcase(name_of(test), pattern) for pattern in patterns):
            yield test


def report(names, failed):
    """The XML of test cases."""
    cases = ['<testcase classname="%s" name="%s" status="run" result="completed">%s</testcase>' % (
        *name.split("."), '<failure message=%s/>' % xml.sax.saxutils.quoteattr(
            failed[name][-300:]) if name in failed else "") for name in names]
    return "<testsuites><testsuite>%s</testsuite></testsuites>\n" % "".join(cases)


def main():
    """Returns the exit code of the tests of __main__."""
    patterns = os.environ.get("TESTBRIDGE_TEST_ONLY", "*").split(":")
    tests = list(selected(unittest.defaultTestLoader.loadTestsFromName("__main__"), patterns))
    result = unittest.TextTestRunner(verbosity=2).run(unittest.TestSuite(tests))
    failed = {name_of(test): text for test, text in result.failures + result.errors}
    if os.environ.get("XML_OUTPUT_FILE"):
        with open(os.environ["XML_OUTPUT_FILE"], "w", encoding="utf-8") as file:
            file.write(report([name_of(test) for test in tests], failed))
    return 0 if result.wasSuccessful() else 1
