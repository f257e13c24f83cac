#!/usr/bin/python3
"""What `dist/release` refuses, and what it makes, in a small repository with a
stand-in for Bazel."""
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import unittest

HERE = os.path.dirname(os.path.abspath(__file__))
# Packs two archives with a program `tessera` that says what $SAYS is.
BAZEL = r'''#!/usr/bin/python3
import io, os, sys, tarfile
assert sys.argv[1:] == ['build', '//:dist', '//:bundle'], sys.argv
if os.environ.get('FAILS'):
    sys.exit(1)
script = '#!/bin/sh\necho "tessera %s"\n' % os.environ.get('SAYS', '1.2.3')
for path, top in (('bazel-bin/dist/tessera-linux-x86_64.tar.gz',
                   'tessera-1.2.3-linux-x86_64'),
                  ('bazel-bin/bundle/tessera.tar.gz', 'tessera')):
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with tarfile.open(path, 'w:gz') as tar:
        info = tarfile.TarInfo(top + '/bin/tessera')
        info.size, info.mode = len(script), 0o755
        tar.addfile(info, io.BytesIO(script.encode()))
'''
FILES = {
    '.gitignore': '/bazel-*\n/release\n',
    'engine/api/version.h':
        'inline constexpr char kTesseraVersion[] = "1.2.3";\n',
    'CHANGELOG.md': '# Changelog\n\n## Unreleased\n\n## 1.2.3\n\n- It is new.\n',
}
ARCHIVE = 'tessera-1.2.3-linux-x86_64.tar.gz'
BUNDLE = 'tessera-1.2.3-bundle-linux-x86_64.tar.gz'


class ReleaseTest(unittest.TestCase):

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = os.path.join(folder.name, 'checkout')
        tools = os.path.join(folder.name, 'tools')
        os.makedirs(tools)
        with open(tools + '/bazel', 'w', encoding='utf-8') as file:
            file.write(BAZEL)
        os.chmod(tools + '/bazel', 0o755)
        self.environment = {
            'PATH': tools + ':/usr/bin:/bin', 'HOME': folder.name,
            'GIT_CONFIG_NOSYSTEM': '1',
            **{'GIT_%s_%s' % (who, what): 'somebody@example.org'
               for who in ('AUTHOR', 'COMMITTER') for what in ('NAME', 'EMAIL')}}
        for name, text in FILES.items():
            self.write(name, text)
        os.makedirs(self.root + '/dist')
        shutil.copy(HERE + '/release', self.root + '/dist/release')
        self.git('init', '--quiet')
        self.commit()

    def write(self, name, text):
        path = os.path.join(self.root, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, 'w', encoding='utf-8') as file:
            file.write(text)

    def git(self, *words):
        subprocess.run(['git', *words], cwd=self.root, check=True,
                       env=self.environment)

    def commit(self):
        self.git('add', '--all')
        self.git('commit', '--quiet', '--allow-empty', '--message', 'All')

    def release(self, *words, **environment):
        return subprocess.run(
            [sys.executable, self.root + '/dist/release', *words], check=False,
            cwd='/', text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env={**self.environment, **environment})

    def refuses(self, words, *call, **environment):
        done = self.release(*(call or ['1.2.3']), **environment)
        self.assertEqual(done.returncode, 1, done.stdout + done.stderr)
        self.assertIn('dist/release: ', done.stderr)
        self.assertIn(words, done.stderr)
        self.assertFalse(os.path.exists(self.root + '/release/1.2.3'))

    def test_a_release(self):
        done = self.release('1.2.3')
        self.assertEqual(done.returncode, 0, done.stderr)
        folder = self.root + '/release/1.2.3'
        self.assertEqual(sorted(os.listdir(folder)),
                         ['SHA256SUMS', BUNDLE, ARCHIVE])
        subprocess.run(['sha256sum', '--check', '--strict', 'SHA256SUMS'],
                       cwd=folder, check=True, stdout=subprocess.DEVNULL)
        with open(folder + '/SHA256SUMS', encoding='utf-8') as file:
            sums = dict(reversed(line.split()) for line in file)
        self.assertEqual(set(sums), {ARCHIVE, BUNDLE})
        for name, expected in sums.items():
            with open(os.path.join(folder, name), 'rb') as file:
                self.assertEqual(hashlib.sha256(file.read()).hexdigest(),
                                 expected)
        self.assertEqual(os.listdir(self.root + '/release'), ['1.2.3'])
        self.assertIn('git tag -a v1.2.3', done.stdout)
        # One is not replaced, and the tag may be there by now.
        again = self.release('1.2.3')
        self.assertIn('is there already', again.stderr)
        self.git('tag', '-a', 'v1.2.3', '-m', 'It')
        other = self.release('1.2.3', '--out', self.root + '/release/other')
        self.assertEqual(other.returncode, 0, other.stderr)

    def test_a_tree_that_is_not_committed(self):
        self.write('new.cc', '')
        self.refuses('not committed: ?? new.cc;')
        self.commit()
        self.write('new.cc', '// changed\n')
        self.refuses('not committed: M new.cc;')

    def test_another_version(self):
        self.refuses('engine/api/version.h has version 1.2.3, expected 1.2.4',
                     '1.2.4')
        self.write('engine/api/version.h', '')
        self.commit()
        self.refuses('engine/api/version.h has version none, expected 1.2.3')

    def test_the_changelog(self):
        for text, words in (
                ('## 1.2.30\n\n- Other.\n', 'has no section "## 1.2.3"'),
                ('## 1.2.3\n\n## 1.2.2\n\n- Old.\n', 'section 1.2.3 is empty'),
                ('## Unreleased\n\n- New.\n\n## 1.2.3\n\n- Old.\n',
                 'still has changes under "Unreleased"')):
            self.write('CHANGELOG.md', text)
            self.commit()
            self.refuses(words)
        self.write('CHANGELOG.md', '## 1.2.3 (2026-12-01)\n\n- It.\n')
        self.commit()
        self.assertEqual(self.release('1.2.3').returncode, 0)

    def test_a_tag_of_another_commit(self):
        self.git('tag', 'v1.2.3')
        self.write('more', '')
        self.commit()
        self.refuses('the tag v1.2.3 is another commit')

    def test_what_was_built_is_tried(self):
        self.refuses('tessera says "tessera 1.2.2", expected "tessera 1.2.3"',
                     SAYS='1.2.2')
        self.refuses('bazel build //:dist //:bundle failed', FAILS='1')
        self.assertEqual(os.listdir(self.root + '/release'), [])

    def test_wrong_words(self):
        for words in ([], ['v1.2.3'], ['1.2'], ['1.2.3', '--fast']):
            done = self.release(*words)
            self.assertEqual(done.returncode, 2, words)
            self.assertIn('usage: dist/release VERSION', done.stderr)


if __name__ == '__main__':
    unittest.main()
