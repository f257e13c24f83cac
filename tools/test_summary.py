"""Prints how many test cases passed and failed in runs of bazel test.

usage: test_summary.py EVENTS CODE PROFILE [EVENTS CODE PROFILE ...]

EVENTS is what --build_event_json_file wrote, CODE is bazel's exit code, PROFILE
what --profile wrote, from which a table says where the time went. Every
<testcase> of the test.xml files counts once, those of cached results too. A
target that failed without a failed case (it crashed, timed out, or could not be
built) counts as one failure. Exits with 1 if anything failed, or if a run found
nothing to run.
"""

import json
import os
import sys
import urllib.parse
import xml.etree.ElementTree

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import build_times  # pylint: disable=wrong-import-position


def read_events(path):
    with open(path, encoding="utf-8") as file:
        for line in file:
            try:
                yield json.loads(line)
            except ValueError:
                return  # bazel was killed while it wrote this line


def final_results(events):
    """Returns {label: [(status, xml path or None)]}, and {label: status}."""
    attempts = {}
    summaries = {}
    for event in events:
        ident = event.get("id", {})
        if "testResult" in ident:
            key = ident["testResult"]
            result = event.get("testResult", {})
            xml = None
            for output in result.get("testActionOutput", []):
                if output.get("name") == "test.xml" and "uri" in output:
                    xml = urllib.parse.unquote(
                        urllib.parse.urlparse(output["uri"]).path)
            run = (key["label"], key.get("run"), key.get("shard"))
            # Attempts of a flaky test come in order; the last one counts.
            attempts[run] = (result.get("status", "NO_STATUS"), xml)
        elif "testSummary" in ident:
            summaries[ident["testSummary"]["label"]] = event.get(
                "testSummary", {}).get("overallStatus", "NO_STATUS")
    results = {}
    for (label, _, _), result in attempts.items():
        results.setdefault(label, []).append(result)
    return results, summaries


def count_cases(path):
    """Returns [passed, failed, skipped] of one test.xml."""
    counts = [0, 0, 0]
    try:
        root = xml.etree.ElementTree.parse(path).getroot()
    except (OSError, xml.etree.ElementTree.ParseError):
        return counts
    for case in root.iter("testcase"):
        if case.find("failure") is not None or case.find("error") is not None:
            counts[1] += 1
        elif case.get("status") == "notrun":
            continue  # disabled, or filtered out
        elif case.find("skipped") is not None or case.get("result") == "skipped":
            counts[2] += 1
        else:
            counts[0] += 1
    return counts


def count(results, summaries):
    """Returns [passed, failed, skipped] of a whole run's final_results."""
    total = [0, 0, 0]
    for label in sorted(set(results) | set(summaries)):
        counts = [0, 0, 0]
        good = summaries.get(label, "PASSED") in ("PASSED", "FLAKY")
        for status, path in results.get(label, []):
            if path:
                counts = [a + b for a, b in zip(counts, count_cases(path))]
            good = good and status in ("PASSED", "FLAKY")
        if not good and not counts[1]:
            counts[1] = 1
        total = [a + b for a, b in zip(total, counts)]
    return total


def count_run(path, code, profile):
    """Prints where the time went; returns [passed, failed, skipped]."""
    results, summaries = final_results(read_events(path))
    reports = {label: [xml for _, xml in runs if xml]
               for label, runs in results.items()}
    for line in build_times.table(build_times.read_actions(profile), reports):
        print(line)
    counts = count(results, summaries)
    # 1: something that is no test did not build; 4: there was no test at all.
    if not counts[1] and (code != 0 or sum(counts) == 0):
        counts[1] = 1
    return counts


def main(runs):
    """Takes [(path, code, profile)]."""
    passed, failed, skipped = map(sum, zip(*(count_run(*run) for run in runs)))
    line = "%d passed, %d failed" % (passed, failed)
    if skipped:
        line += ", %d skipped" % skipped
    print(line)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main([(path, int(code), profile) for path, code, profile in
                   zip(sys.argv[1::3], sys.argv[2::3], sys.argv[3::3])]))
