#!/usr/bin/python3
"""The program `tessera`: its exit status, what it does on a terminal, and the page
of `tessera report`, which is XML, holds every series, and needs no other file."""

import json
import os
import pathlib
import pty
import subprocess
import sys
import tempfile
import unittest
import urllib.parse
import xml.etree.ElementTree as ET

TESSERA = "tools/tessera"
HOSTILE = "</script><img src=x onerror=alert(1)>&\"'\u0001"
NS = "{http://www.w3.org/1999/xhtml}"


def metrics(step):
    return {
        "step": step,
        "time": 1.7e9 + step,
        "loss": 10 / step,
        "lr": 1e-3,
        "grad_norm": 1.0,
        "step_ms": 100.0,
        "forward_ms": 30.0,
        "backward_ms": 60.0,
        "update_ms": 10.0,
        "data_wait_ms": 1.0,
        "exposed_comm_ms": 7.0,
        "tokens_per_second": 5e5,
        "memory_peak_bytes": 3e9,
        "memory_parameters_bytes": 1e9,
        "memory_activations_bytes": 2e9,
        "step_ms_slowest": 101.0,
        "step_ms_fastest": 99.0,
        "step_slowest_rank": 1,
        HOSTILE: step,
    }


def trace(rank):
    def event(track, name, begin, end, **args):
        return {"name": name, "cat": track, "ph": "X", "ts": begin,
                "dur": end - begin, "pid": rank, "tid": 1, "args": args}
    return {
        "traceEvents": [
            event("steps", "step 3", 0, 1e5, step=3),
            event("main", "forward", 0, 4e4),
            event("communication", "all-gather of unit <u>", 0, 2e4,
                  sequence=1, group="", queued_us=0),
            event("main", "wait: all-gather of unit <u>", 1e4, 2e4,
                  wait="gather", unit="<u>"),
        ],
        "otherData": {"tessera": 1, "rank": rank, "world_size": 2,
                      "host": "h", "spans_left_out": 0},
    }


class CommandTest(unittest.TestCase):
    def run_tool(self, *args):
        return subprocess.run([TESSERA, *args], capture_output=True, text=True,
                              check=False)

    def test_help_names_each_command_once(self):
        done = self.run_tool("help")
        self.assertEqual(done.returncode, 0)
        self.assertEqual(self.run_tool().stderr, done.stdout)
        names = [line[2:24].strip() for line in done.stdout.splitlines()
                 if line.startswith("  ") and not line.startswith("   ")]
        self.assertEqual(len(names), len(set(names)), done.stdout)
        for name in ("config check", "plan", "checkpoint ls", "trace summary",
                     "report", "tokenize", "doctor", "version"):
            self.assertIn(name, names)

    def test_faults_have_an_exit_status(self):
        # commands_test.cc tries all of them, without a process.
        for args, status, said in (
                (["chekpoint"], 2, "did you mean 'checkpoint'?"),
                (["config", "check", "/none"], 1, "/none"),
                (["trace", "merge", "here"], 2, ": OUT is missing"),
                (["checkpoint", "rm", "/none"], 1, "/none: No such file")):
            done = self.run_tool(*args)
            self.assertEqual(done.returncode, status, args)
            self.assertIn(said, done.stderr)

    def test_the_manual_is_that_of_docs(self):
        with open("docs/tessera.1", encoding="utf-8") as page:
            self.assertEqual(self.run_tool("manual").stdout, page.read(),
                             "run `tessera manual > docs/tessera.1`")

    def test_version(self):
        for args in (["--version"], ["version"]):
            self.assertRegex(self.run_tool(*args).stdout,
                             r"\Atessera \d+\.\d+\.\d+\n\Z")

    def test_output_that_cannot_be_written_is_an_error(self):
        for args in (["config", "schema"], ["help"], ["checkpoint", "--help"]):
            with open("/dev/full", "w") as full:
                done = subprocess.run([TESSERA] + args, stdout=full,
                                      stderr=subprocess.PIPE, text=True)
            self.assertEqual(done.returncode, 1, args)
            self.assertIn("not all of the output could be written", done.stderr)


class TerminalTest(unittest.TestCase):
    """What is only so where a person sits."""

    def on_terminal(self, *args, answer="", **env):
        """Returns the exit status, and what a terminal shows."""
        ours, theirs = pty.openpty()
        tool = subprocess.Popen(
            [TESSERA, *args], stdin=theirs, stdout=theirs, stderr=theirs,
            env={"TERM": "xterm", **env})
        os.close(theirs)
        os.write(ours, answer.encode())
        shown = b""
        while True:
            try:
                part = os.read(ours, 4096)
            except OSError:  # the other end is closed
                break
            if not part:
                break
            shown += part
        os.close(ours)
        return tool.wait(), shown.decode()

    def test_rm_asks(self):
        with tempfile.TemporaryDirectory() as folder:
            left = pathlib.Path(folder) / "step" / "0123456789abcdef.rank-00000"
            left.parent.mkdir()
            left.write_text("some")
            rm = ("checkpoint", "rm", str(left.parent))
            asked = "step: an unfinished save, 1 file, 4 bytes\r\nRemove it? [y/N]"
            for answer in ("n\n", "\n", "\x04"):
                status, shown = self.on_terminal(*rm, answer=answer)
                self.assertEqual(status, 1)
                self.assertIn(asked, shown)
                self.assertTrue(left.exists())
            done = subprocess.run([TESSERA, *rm], stdin=subprocess.DEVNULL,
                                  capture_output=True, text=True, check=False)
            self.assertEqual(done.returncode, 2)
            self.assertIn("--yes", done.stderr)
            self.assertTrue(left.exists())
            status, shown = self.on_terminal(*rm, answer="y\n")
            self.assertEqual(status, 0, shown)
            self.assertIn(asked, shown)
            self.assertFalse(left.parent.exists())

    def test_colors_are_for_terminals(self):
        self.assertIn("\x1b[3", self.on_terminal("doctor")[1])
        self.assertNotIn("\x1b", self.on_terminal("doctor", NO_COLOR="1")[1])
        self.assertNotIn("\x1b", self.on_terminal("doctor", TERM="dumb")[1])
        done = subprocess.run([TESSERA, "doctor"], capture_output=True,
                              text=True, check=False,
                              env={**os.environ, "TERM": "xterm"})
        self.assertNotIn("\x1b", done.stdout)


class ReportTest(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.run_folder = pathlib.Path(self.folder.name) / "a <run>"
        self.run_folder.mkdir()

    def tearDown(self):
        self.folder.cleanup()

    def report(self):
        return subprocess.run([TESSERA, "report", str(self.run_folder)],
                              capture_output=True, text=True, check=False)

    def page(self):
        result = self.report()
        self.assertEqual(result.returncode, 0, result.stderr)
        text = (self.run_folder / "report.html").read_text(encoding="utf-8")
        return ET.fromstring(text.split("\n", 1)[1]), text, result.stderr

    def write_all(self):
        lines = [json.dumps(metrics(s)) for s in range(1, 8)]
        (self.run_folder / "metrics.jsonl").write_text(
            "\n".join(lines) + "\n{\"step\": 8, \"lo")
        (self.run_folder / "run.json").write_text(json.dumps({
            "world_size": 2, "stage": 3, "plan": "planned </pre> 3 GiB",
            "config": {"train_batch_size": 8, "x": "</details><b>"}}))
        for rank in range(2):
            (self.run_folder / f"trace.rank{rank}.json").write_text(
                json.dumps(trace(rank)))

    def test_every_series_is_there(self):
        self.write_all()
        page, text, notes = self.page()
        series = {g.get("data-series") for g in page.iter(NS + "g")}
        for name in ("loss", "lr", "gradient norm", "step", "forward",
                     "backward", "update", "for communication (exposed)",
                     "for data", "tokens", "parameters", "activations", "peak",
                     HOSTILE.replace("\u0001", "\ufffd")):
            self.assertIn(name, series)
        words = "".join(page.itertext())
        for word in ("planned </pre> 3 GiB", "train_batch_size",
                     "slowest rank behind the fastest", "step 7",
                     "</details><b>", "gather of unit <u>", "was the slowest",
                     "others waited for it"):
            self.assertIn(word, words)
        self.assertIn("the last: the run was still writing", notes)
        self.assertIn("the last: the run was still writing", words)

    def test_nothing_comes_from_elsewhere(self):
        self.write_all()
        (self.run_folder / "memory0.html").write_text(
            "<html><head><title>Memory of step 3, rank 0</title></head></html>")
        page, text, _ = self.page()
        links = 0
        for element in page.iter():
            self.assertNotIn(element.tag, (NS + "script", NS + "link",
                                           NS + "img", NS + "iframe"))
            for name, value in element.attrib.items():
                self.assertFalse(name.startswith("on"), name)
                self.assertNotEqual(name, "src")
                if name == "href":  # only to a page that lies beside this one
                    self.assertTrue(value.startswith("./"), value)
                    self.assertTrue((self.run_folder / value).exists(), value)
                    links += 1
        self.assertEqual(links, 1)
        self.assertNotIn("url(", text)
        self.assertNotIn("@import", text)
        self.assertIn("prefers-color-scheme:dark", text)

    def test_links_of_a_page_elsewhere_lead_to_the_run(self):
        self.write_all()
        (self.run_folder / "memory0.html").write_text(
            "<html><head><title>Memory of step 3, rank 0</title></head></html>")
        root = pathlib.Path(self.folder.name)
        (root / "pages" / "deep").mkdir(parents=True)
        (root / "short").symlink_to(root / "pages" / "deep")
        for out in ("page.html", "pages/deep/page.html", "short/page.html"):
            subprocess.run(
                [os.path.abspath(TESSERA), "report", self.run_folder.name, "--out", out],
                cwd=root, check=True, stdout=subprocess.DEVNULL)
            page = ET.fromstring(
                (root / out).read_text(encoding="utf-8").split("\n", 1)[1])
            link, = [e.get("href") for e in page.iter(NS + "a")]
            self.assertTrue(link.startswith("./"), link)
            # A browser takes the page's path as it is given.
            at = (root / out).resolve().parent / urllib.parse.unquote(link)
            self.assertTrue(at.is_file(), "%s of %s" % (link, out))

    def test_each_step_tells_its_values(self):
        self.write_all()
        page, _, _ = self.page()
        loss = next(figure for figure in page.iter(NS + "figure")
                    if figure.find(NS + "figcaption").text == "loss")
        titles = [title.text for title in loss.iter(NS + "title")]
        self.assertEqual(len(titles), 7)
        self.assertEqual(titles[2], "step 3\nloss: 3.3333")
        self.assertIn("loss: 1.43 last, 1.43 lowest (step 7)",
                      "".join(loss.itertext()))

    def test_a_trace_alone_is_a_page(self):
        (self.run_folder / "trace.rank0.json").write_text(json.dumps(trace(0)))
        page, _, _ = self.page()
        self.assertIn("gather of unit <u>", "".join(page.itertext()))

    def test_an_empty_folder_is_one_error(self):
        result = self.report()
        self.assertEqual(result.returncode, 1)
        self.assertEqual(result.stderr.count("\n"), 1)
        self.assertIn("holds none of metrics.jsonl", result.stderr)


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0], "-v"])
