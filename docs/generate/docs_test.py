#!/usr/bin/python3
"""Are the pages of docs/ as the tree is?"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import unittest

sys.path.insert(0, os.path.join(os.getcwd(), "docs/generate"))
import links  # noqa: E402
import messages  # noqa: E402
import public_headers  # noqa: E402
import race  # noqa: E402
import troubleshooting  # noqa: E402
import variables  # noqa: E402

# Bazel shows us links; the sources are where they lead.
ROOT = os.path.dirname(os.path.realpath("WORKSPACE"))
AGAIN = "run docs/generate/update and look at what changes"


def read(path):
    with open(os.path.join(ROOT, path), encoding="utf-8") as file:
        return file.read()


class Messages(unittest.TestCase):
    """What messages.py makes of sources."""

    def found(self, source):
        return [(m.kind, m.text) for m in messages.messages_of(
            tuple(messages.lex(source)), "x.cc")]

    def test_literals_and_holes(self):
        self.assertEqual(
            [("InvalidArgument", "rank … has come twice: two have one")],
            self.found('return absl::InvalidArgumentError(absl::StrCat('
                       '"rank ", rank_, " has come "\n  "twice", ": two have one"));'))

    def test_choices(self):
        self.assertEqual(
            [("DataLoss", "…: [more|no] data files[, which is odd]; look")],
            self.found('return absl::DataLossError(absl::StrCat(path, ": ", n > 1 ? '
                       '"more" : "no", " data files", odd ? ", which is odd" : "", '
                       '"; look"));'))

    def test_a_piece_is_what_no_maker_holds(self):
        self.assertEqual(
            [("piece", "cannot make the file")],
            self.found('if (fd < 0) { return Refused("cannot make the file"); }'))

    def test_one_word_alone_is_no_piece(self):
        self.assertEqual([], self.found('return Refused("fstat");'))

    def test_log_of_several_lines(self):
        self.assertEqual(
            [("log WARNING", "…; taking gloo")],
            self.found('TESSERA_LOG_RANK0(WARNING) << status.message()\n  << "; taking "'
                       '\n  << std::string("gloo");'))

    def test_checks_throw(self):
        self.assertEqual(
            [("exception", "dim … is odd")],
            self.found('TORCH_CHECK(dim % 2 == 0, "dim ", dim, " is odd");'))

    def test_comments_and_includes_say_nothing(self):
        self.assertEqual([], self.found(
            '// return absl::InternalError("not this one");\n#include "a b/c d.h"\n'
            '/* absl::InternalError("nor this one") */ char c = \'"\';'))

    def test_raw_strings_and_escapes(self):
        self.assertEqual(
            [("Internal", 'it is "raw" (here)'), ("Internal", 'a "quoted" word; two lines')],
            self.found('return absl::InternalError(R"(it is "raw" (here))");\n'
                       'return absl::InternalError("a \\"quoted\\" word;\\ntwo lines");'))

    def test_a_key_and_its_fault(self):
        self.assertEqual(
            [("piece", "aio.use_gds: expected false, got …")],
            self.found('faults->Add("aio.use_gds", "expected false, got ", value);'))

    def test_no_maker_of_the_tree_is_overlooked(self):
        # Counted in another way: by their text, comments taken out.
        for path in messages.sources(ROOT):
            plain = re.sub(r"//[^\n]*", "", read(path))
            written = len(re.findall(r"absl::[A-Z]\w+Error\(|TESSERA_LOG(?:_RANK0)?\(", plain))
            tokens = messages.tokens_of(os.path.join(ROOT, path))
            kinds = [messages.maker_at(tokens, i) for i in range(len(tokens))]
            seen = [k for k in kinds if k and k[0] not in ("Status", "exception")]
            if path != "base/log.h":
                self.assertEqual(written, len(seen), path)


class Troubleshooting(unittest.TestCase):
    def test_is_what_the_code_says(self):
        text, faults, count = troubleshooting.page(ROOT)
        self.assertEqual(0, len(faults), "\n" + "\n".join(faults))
        self.assertGreater(count, 500)
        self.assertEqual(text, read(troubleshooting.PAGE), AGAIN)

    def test_a_message_without_family_is_a_fault(self):
        notes = {"left_out": [], "chapter": [{"family": [
            {"title": "a", "files": ["a/*"]}, {"title": "b", "files": ["b/*"]}]}]}
        found = [messages.Message("it is", "Internal", "a/x.cc"),
                 messages.Message("it was", "Internal", "c/x.cc")]
        _, faults = troubleshooting.assign(found, notes)
        self.assertEqual(["c/x.cc: no family for: it was",
                          "family without messages: b"], faults)


class Environment(unittest.TestCase):
    def test_page_has_all_variables_and_no_others(self):
        found = variables.all_variables(ROOT)
        documented = variables.documented(read(variables.PAGE))
        self.assertGreater(len(found), 50)
        self.assertEqual({}, {n: p for n, p in found.items() if n not in documented},
                         "read, and not in " + variables.PAGE)
        self.assertEqual(set(), documented - found.keys(), "documented, and never read")

    def test_scripts_are_read(self):
        self.assertEqual(["CUDA_HOME", "PATH"], variables.of_python(
            "os.environ.get('CUDA_HOME', '/usr')\nctx.os.environ[\"PATH\"]"))


class ManPage(unittest.TestCase):
    """That it is what `tessera manual` prints: //tools:report_test."""

    @unittest.skipUnless(shutil.which("groff"), "groff is not installed")
    def test_is_good_roff(self):
        done = subprocess.run(
            ["groff", "-man", "-ww", "-z", "-Tutf8", os.path.join(ROOT, "docs/tessera.1")],
            capture_output=True, text=True, check=True)
        self.assertEqual("", done.stderr)


class Headers(unittest.TestCase):
    """The public headers, and what Doxygen is given of them."""

    HEADER = """// What it is,
// in two lines.
#ifndef X_H_
namespace tessera {

struct Options {
  // Steps; of the
  //   whole run
  int steps = 1;
  int of = 2;  // how many
};

class Thing {
 public:
  int size() const { return 1; }
  Thing(const Thing&) = delete;

  void Undescribed(int x,
                   int y);
 private:
  void Hidden(int x);
};

void Free(int x) {
  if (x) { Free(x); }
}
}  // namespace tessera
#endif
"""

    def test_all_is_described(self):
        headers = public_headers.public(ROOT)
        self.assertGreater(len(headers), 25)
        count, missing = 0, []
        for path in headers:
            text = read(path)
            count += len(public_headers.Reader(text).declarations)
            missing += ["%s:%d: %s" % (path, d.line, d.text)
                        for d in public_headers.undescribed(text, path)]
        self.assertEqual(0, len(missing), "\n" + "\n".join(missing))
        self.assertGreater(count, 400)

    def test_what_is_not_is_found(self):
        self.assertEqual(
            ["void Undescribed(int x, int y);", "void Free(int x) {"],
            [d.text.split(" if")[0] for d in public_headers.undescribed(self.HEADER)
             if not d.text.startswith("class")])

    def test_comments_become_doxygens(self):
        text = public_headers.filtered(self.HEADER)
        self.assertIn("/// @file\n/// What it is,\n", text)
        self.assertIn("/// Steps; of the\n/// @verbatim\n///   whole run\n"
                      "/// @endverbatim\n  int steps = 1;", text)
        self.assertIn("int of = 2;  ///< how many", text)
        self.assertNotIn("delete", text)

    @unittest.skipUnless(shutil.which("doxygen"), "doxygen is not installed")
    def test_doxygen_has_nothing_to_say(self):
        with tempfile.TemporaryDirectory() as folder:
            done = subprocess.run([os.path.join(ROOT, "docs/api_reference"), folder],
                                  capture_output=True, text=True, check=False)
            self.assertEqual((0, ""), (done.returncode, done.stderr))
            self.assertTrue(os.path.exists(os.path.join(
                folder, "html/classtessera_1_1Engine.html")))


class Race(unittest.TestCase):
    def test_is_what_the_results_say(self):
        self.assertEqual(race.picture(ROOT), read(race.PICTURE), AGAIN)
        self.assertEqual(race.gpu_picture(ROOT), read(race.GPU_PICTURE), AGAIN)

    def test_axes_are_named(self):
        self.assertIn("divided by the peer's (log scale)", race.picture(ROOT))
        self.assertIn("milliseconds per step", race.gpu_picture(ROOT))
        self.assertTrue(all(0 < ms < race.GPU_MOST_MS for _, times in race.gpu_times(ROOT)[1]
                            for ms in times.values()))

    def test_shows_all_rows_beside_peers(self):
        ratios = race.ratios(ROOT)
        self.assertGreater(len(ratios), 10)
        self.assertTrue(all(race.LEAST < r.low <= r.median <= r.high < race.MOST
                            for r in ratios), ratios)


class Quickstart(unittest.TestCase):
    def test_has_the_files_of_the_example(self):
        page = read("docs/quickstart.md")
        for name in ("train.cc", "train.json", "CMakeLists.txt"):
            self.assertIn("\n%s```" % read("examples/quickstart/" + name), page, name)
        self.assertNotRegex(page, r"(?m)^@\w+@?")


class Links(unittest.TestCase):
    def test_all_lead_somewhere(self):
        faults = list(links.broken(ROOT))
        self.assertEqual(0, len(faults), "\n" + "\n".join(faults))
        self.assertGreater(len(list(links.pages(ROOT))), 10)

    def test_readme_is_the_index(self):
        text = read("README.md")
        self.assertEqual([], [page for page in links.pages(ROOT)
                              if os.path.dirname(page) == "docs" and "(%s" % page not in text])

    def test_broken_ones_are_found(self):
        with tempfile.TemporaryDirectory() as root:
            with open(os.path.join(root, "a.md"), "w", encoding="utf-8") as file:
                file.write("# One `two`, three\n[a](b.md) [b](#one-two-three) [c](#four)\n"
                           "[d](https://x.org/#y) `[e](no.md)` [f](a.md#one)\n"
                           "```\n[g](no.md)\n```\n")
            self.assertEqual(
                ["a.md: b.md: there is no b.md", "a.md: #four: a.md has no such heading",
                 "a.md: a.md#one: a.md has no such heading"], list(links.broken(root)))


if __name__ == "__main__":
    sys.exit(unittest.main(verbosity=2))
