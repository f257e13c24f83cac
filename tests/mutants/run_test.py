#!/usr/bin/python3
"""Does tests/mutants/run choose what its options say, and is its table whole?"""
import importlib.machinery
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import unittest

HERE = os.path.dirname(os.path.abspath(__file__))


def listed(*options):
    """The lines of --list."""
    return subprocess.run(
        [sys.executable, os.path.join(HERE, 'run'), '--list', *options],
        check=True, stdout=subprocess.PIPE,
        universal_newlines=True).stdout.splitlines()


class RunTest(unittest.TestCase):

    def test_the_table_and_the_folder_agree(self):
        with open(os.path.join(HERE, 'mutants.txt')) as table:
            rows = [line for line in table
                    if line.strip() and not line.startswith('#')]
        self.assertEqual(len(listed()), len(rows))

    def test_folder_takes_what_touches_it(self):
        chosen = listed('--folder', 'sharding/dispatch/')
        self.assertTrue(chosen)
        for line in listed():
            name = line.split(' | ')[0]
            with open(os.path.join(HERE, name)) as patch:
                touches = any(text.startswith('+++ b/sharding/dispatch/')
                              for text in patch)
            self.assertEqual(line in chosen, touches, name)

    def test_folder_is_no_prefix_of_a_name(self):
        with self.assertRaises(subprocess.CalledProcessError):
            listed('--folder', 'shard')

    def test_sample_is_reproducible_and_within_the_folder(self):
        comm = listed('--folder', 'comm')
        first = listed('--folder', 'comm', '--sample', '4', '--seed', '1')
        self.assertEqual(len(set(first)), 4)
        self.assertLessEqual(set(first), set(comm))
        self.assertEqual(
            first, listed('--folder', 'comm', '--sample', '4', '--seed', '1'))
        others = [listed('--folder', 'comm', '--sample', '4', '--seed', str(s))
                  for s in range(2, 6)]
        self.assertTrue(any(other != first for other in others))

    def test_sample_of_more_than_all_is_all(self):
        self.assertEqual(listed('--sample', '100000'), listed())

    def test_unseen_are_those_whose_fault_or_row_is_another(self):
        with tempfile.TemporaryDirectory() as folder:
            shutil.copy(os.path.join(HERE, 'run'), folder)

            def write(name, *lines):
                with open(os.path.join(folder, name), 'w') as out:
                    out.write('\n'.join(lines) + '\n')

            def unseen():
                answer = subprocess.run(
                    [sys.executable, os.path.join(folder, 'run'), '--list',
                     '--unseen'], check=True, stdout=subprocess.PIPE,
                    universal_newlines=True)
                return [line.split(' | ')[0]
                        for line in answer.stdout.splitlines()]

            write('mutants.txt', '1-a.patch | //a:a_test | A.*',
                  '2-b.patch | //b:b_test | B.*')
            write('1-a.patch', '--- a/x', '+++ b/x', '@@ -1 +1 @@', '-1', '+2')
            write('2-b.patch', '--- a/y', '+++ b/y', '@@ -1 +1 @@', '-1', '+2')
            self.assertEqual(unseen(), ['1-a.patch', '2-b.patch'])
            sys.dont_write_bytecode = True
            loader = importlib.machinery.SourceFileLoader(
                'mutants_run', os.path.join(folder, 'run'))
            spec = importlib.util.spec_from_loader('mutants_run', loader)
            run = importlib.util.module_from_spec(spec)
            loader.exec_module(run)
            for mutant in run.read_table():
                run.note_seen(mutant)
            self.assertEqual(unseen(), [])
            # It has moved in its file.
            write('1-a.patch', '--- a/x', '+++ b/x', '@@ -9 +9 @@', '-1', '+2')
            self.assertEqual(unseen(), [])
            write('1-a.patch', '--- a/x', '+++ b/x', '@@ -9 +9 @@', '-1', '+3')
            self.assertEqual(unseen(), ['1-a.patch'])
            write('mutants.txt', '1-a.patch | //a:a_test | A.*',
                  '2-b.patch | //b:b_test | B.Other')
            self.assertEqual(unseen(), ['1-a.patch', '2-b.patch'])


if __name__ == '__main__':
    unittest.main()
