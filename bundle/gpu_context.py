"""What an item of gpu_check runs in: its log, its time, its programs."""
import contextlib
import os
import re
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree

sys.dont_write_bytecode = True

HERE = os.path.dirname(os.path.abspath(__file__))
RUN = os.path.join(HERE, 'run')
# Of compute-sanitizer, in the output of any rank.
FOUND = 'SUMMARY: [1-9].*'
KILL_SECONDS = 5  # that what was killed may take to end


class Skip(Exception):
    pass


class Failed(Exception):
    pass


class TimedOut(Exception):
    pass


class Context:
    """Of one item: its log, the time it has, the GPU (or None, and why)."""

    def __init__(self, log, seconds, gpu, wrong=''):
        self.log, self.gpu, self.wrong = log, gpu, wrong
        self.no_gpu = wrong or 'no GPU'
        self.deadline = time.monotonic() + seconds

    def left(self):
        seconds = self.deadline - time.monotonic()
        if seconds <= 0:
            raise TimedOut()
        return seconds

    def note(self, text):
        with open(self.log, 'a', encoding='utf-8') as file:
            file.write(text + '\n')

    def need_gpu(self):
        if self.gpu is None:
            raise Skip(self.no_gpu)

    def run(self, *command, env=None):
        """Its output, both streams; Failed unless it ends with 0."""
        code, said = self.code_and_output(*command, env=env)
        if code != 0:
            last = ' | '.join(said.strip().splitlines()[-3:])
            raise Failed('%s: exit code %d: %s' % (
                ' '.join(map(os.path.basename, command[:3])), code, last))
        return said

    def code_and_output(self, *command, env=None):
        self.note('$ ' + ' '.join(command) + ''.join(
            '  [%s=%s]' % pair for pair in (env or {}).items()))
        left = self.left()
        # A session of its own: what it starts ends with it, unless that begins
        # another session, which may then hold the output open.
        child = subprocess.Popen(
            command, cwd=HERE, env={**os.environ, **(env or {})},
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, start_new_session=True)
        try:
            out = child.communicate(timeout=left)[0]
        except subprocess.TimeoutExpired:
            out = None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
        if out is None:
            try:
                out = child.communicate(timeout=KILL_SECONDS)[0]
            except subprocess.TimeoutExpired as expired:
                out = expired.output or b''
                child.stdout.close()
            self.note(out.decode(errors='replace'))
            raise TimedOut()
        said = out.decode(errors='replace')
        self.note(said)
        return child.returncode, said

    def gtest(self, program, pattern='*', env=None, prefix=()):
        """(passed, skipped, why) of its cases; Failed if one failed."""
        report = self.log + '.xml'
        with contextlib.suppress(FileNotFoundError):
            os.remove(report)
        code, said = self.code_and_output(
            RUN, *prefix, os.path.join(HERE, 'bin', program),
            '--gtest_filter=' + pattern, '--gtest_output=xml:' + report,
            env=env)
        passed, skipped, failed, why = 0, 0, [], set()
        try:
            root = xml.etree.ElementTree.parse(report).getroot()
        except (OSError, xml.etree.ElementTree.ParseError):
            raise Failed('%s wrote no report (exit code %d): %s' % (
                program, code, ' | '.join(said.splitlines()[-3:]))) from None
        for case in root.iter('testcase'):
            if case.get('status') == 'notrun':
                continue
            skip = case.find('skipped')
            if case.find('failure') is not None:
                failed.append(case.get('name'))
            elif skip is not None:
                skipped += 1
                why.add(skip.get('message', '').strip().splitlines()[-1])
            else:
                passed += 1
        if re.search(FOUND, said):
            raise Failed('%s: %s' % (program, re.search(FOUND, said)[0]))
        if failed or code != 0 or passed + skipped == 0:
            raise Failed('%s: %d failed (%s), %d passed, exit code %d' % (
                program, len(failed), ', '.join(failed[:4]), passed, code))
        return passed, skipped, '; '.join(sorted(why))
