#!/usr/bin/python3
"""Does anything outside the log follow the host's clock?

That clock is set: by hand, by a time service, when a virtual machine resumes. A
deadline that follows it never comes, or has passed at once. Deadlines are of
base/thread/deadline.h, waits with a timeout of base/thread/monotonic_wait.h, durations
of base/monotonic.h. Reads all .h, .cc, .cu and .cuh files of the workspace,
except those of tests.
"""

import os
import re
import sys
import tempfile
import unittest

from layers_test import sources

# What reads the host's clock, or waits for a moment of it. (absl's timed waits
# do, whatever their names say. SleepFor, poll and futexes count from now.)
HOST_CLOCK = re.compile(
    r"\babsl::(?:Now|GetCurrentTimeNanos)\b"
    r"|\b(?:Await|Wait|WaitForNotification|(?:Reader|Writer)?LockWhen)"
    r"With(?:Timeout|Deadline)\b"
    r"|\b(?:system_clock|high_resolution_clock|utc_clock|file_clock)\b"
    r"|\bCLOCK_(?:REALTIME|TAI)\w*|\bgettimeofday\b|\bftime\s*\("
    r"|(?<![\w.>:])(?:std::|::)?time\s*\(\s*(?:NULL|nullptr|0|&\w+)\s*\)"
    r"|\b(?:sem|mtx|cnd|mq)_timed\w+"
    r"|\bpthread_\w+_timed\w+")
COMMENT = re.compile(r"//.*")

# A moment that somebody will read, or that tells files apart: how often in each
# file, and which.
ALLOWED = {
    "base/log.cc": (1, "the time of a line of the log"),
    "checkpoint/format/run_lock.cc": (1, "since when a folder is locked"),
    "checkpoint/save/pending_save.cc": (1, "when a checkpoint was saved"),
    "comm/record/hang_dump.cc": (1, "the time of a dump"),
    "engine/checkpoint_manager.cc": (
        1, "when a checkpoint was saved; later ones are newer all the same"),
    "engine/observe/step_observer.cc": (1, "the time of a line of metrics"),
    "monitor/event_writer.cc": (1, "TensorBoard's wall_time and file names"),
}


def is_test(path):
    return path.startswith(("tests/", "testing/")) or re.search(
        r"_(test|fuzz|testing)\.", path)


def check_file(root, path, allowed):
    """Yields a line for each use of the host's clock that is not allowed."""
    uses = []
    with open(os.path.join(root, path), encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            for match in HOST_CLOCK.finditer(COMMENT.sub("", line)):
                uses.append("%s:%d: %s follows the host's clock" % (
                    path, number, match.group(0).rstrip(" (")))
    most, _ = allowed.get(path, (0, ""))
    if len(uses) > most:
        yield from uses
    elif len(uses) < most:
        yield "%s: tools/clock_test.py allows %d uses, and it has %d" % (
            path, most, len(uses))


def check_tree(root, allowed):
    faults = []
    for path in sources(root):
        if not is_test(path):
            faults.extend(check_file(root, path, allowed))
    return faults


class OnMadeUpTree(unittest.TestCase):
    """Can the check fail?"""

    def faults(self, text, path="a/x.cc", allowed=None):
        with tempfile.TemporaryDirectory() as root:
            os.makedirs(os.path.dirname(os.path.join(root, path)))
            with open(os.path.join(root, path), "w", encoding="utf-8") as file:
                file.write(text)
            return check_tree(root, allowed or {})

    def test_each_way_is_seen(self):
        for use in (
                "absl::Time t = absl::Now();",
                "Clock now = absl::Now;",
                "mutex_.AwaitWithTimeout(c, absl::Seconds(1));",
                "mutex_.LockWhenWithDeadline(c, t);",
                "cv_.WaitWithTimeout(&mutex_, d);",
                "done.WaitForNotificationWithTimeout(d);",
                "std::chrono::system_clock::now()",
                "using Clock = std::chrono::high_resolution_clock;",
                "clock_gettime(CLOCK_REALTIME, &t);",
                "clock_gettime(CLOCK_REALTIME_COARSE, &t);",
                "gettimeofday(&t, nullptr);",
                "const time_t now = time(nullptr);",
                "const time_t now = std::time(0);",
                "sem_timedwait(&s, &t);",
                "pthread_cond_timedwait(&c, &m, &t);",
                "pthread_mutex_timedlock(&m, &t);"):
            self.assertEqual(1, len(self.faults("int a;\n" + use + "\n")), use)

    def test_others_are_not(self):
        for use in (
                "MonotonicNow()", "steady_clock::now()", "absl::SleepFor(d);",
                "// unlike absl::Now() nobody can set it", "step.time(0)",
                "mutex_.AwaitFor(c, d);", "clock_gettime(CLOCK_MONOTONIC, &t);",
                "pthread_cond_clockwait(&c, &m, CLOCK_MONOTONIC, &t);"):
            self.assertEqual([], self.faults(use), use)
        for path in ("a/x_test.cc", "tests/a/x.cc"):
            self.assertEqual([], self.faults("absl::Now()", path), path)

    def test_what_is_allowed(self):
        allowed = {"a/x.cc": (1, "a reason")}
        self.assertEqual([], self.faults("absl::Now()", allowed=allowed))
        self.assertEqual(
            ["a/x.cc:1: absl::Now follows the host's clock",
             "a/x.cc:2: absl::Now follows the host's clock"],
            self.faults("absl::Now()\nabsl::Now()\n", allowed=allowed))
        self.assertEqual(
            ["a/x.cc: tools/clock_test.py allows 1 uses, and it has 0"],
            self.faults("", allowed=allowed))


class OnThisTree(unittest.TestCase):
    def test_nothing_follows_the_hosts_clock(self):
        # Bazel shows us links; the sources are where they lead.
        root = os.path.dirname(os.path.realpath("WORKSPACE"))
        for path in ALLOWED:
            self.assertTrue(os.path.exists(os.path.join(root, path)), path)
        faults = check_tree(root, ALLOWED)
        self.assertEqual(0, len(faults), "\n" + "\n".join(faults))


if __name__ == "__main__":
    sys.exit(unittest.main(verbosity=2))
