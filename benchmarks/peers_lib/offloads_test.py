#!/usr/bin/python3
"""The bounds of offload, what a turn moves, and the bare transfers."""
import errno
import json
import os
import sys
import tempfile
import unittest

sys.path.insert(0, 'benchmarks/peers_lib')
import losses  # pylint: disable=wrong-import-position
import offloads  # pylint: disable=wrong-import-position
import raw_disk  # pylint: disable=wrong-import-position
import rows  # pylint: disable=wrong-import-position
import turns  # pylint: disable=wrong-import-position

GOOD = losses.Verdict([1.0], [1.0])


def outcome(step, apart, at_once, without, name='states', verdict=GOOD):
    n = 9
    way = offloads.Way(name, 3e6, 10, 20, [step] * n, [apart] * n, [at_once] * n)
    return offloads.Outcome(way, offloads.Way('memory', 4e6, step=[without] * n),
                            verdict, [(1.0, 2.0)] * n)


class Stub:
    """A training whose every step reads 2 bytes and writes 3, later."""

    def __init__(self, step=1.0):
        self.step, self.told, self.losses = step, [], [1.0]
        self.pending = self.done = 0

    def turn(self, steps):
        self.told.append(steps)
        if isinstance(steps, str):
            return []
        self.pending += steps
        return [0.0] + [self.step] * (steps - 1)

    def settle(self):
        self.done, self.pending = self.done + self.pending, 0


class BoundsTest(unittest.TestCase):

    def test_the_larger_bound_counts(self):
        for apart, at_once, without, expected in (
                (80, 90, 50, 0.8), (90, 70, 50, 0.7), (20, 30, 95, 0.95)):
            one = outcome(100, apart, at_once, without)
            self.assertAlmostEqual(one.efficiency.median, expected)
            self.assertEqual(one.met, expected >= 0.9)

    def test_goals_differ(self):
        self.assertTrue(outcome(100, 87, 87, 1, 'parameters').met)
        self.assertFalse(outcome(100, 87, 87, 1, 'states').met)

    def test_clipping_is_beside_later_steps(self):
        for late, expected in ((98, 0.98), (96, 0.96)):
            one = outcome(100, 500, 500, late, 'clipping')
            self.assertAlmostEqual(one.efficiency.median, expected)
            self.assertEqual(one.met, expected >= 0.97)
        self.assertEqual(offloads.beside(('states', 'clipping')),
                         ['memory', 'late', 'states', 'clipping'])

    def test_wrong_losses_meet_nothing(self):
        bad = losses.Verdict([1.0], [2.0])
        self.assertFalse(outcome(100, 99, 99, 1, verdict=bad).met)

    def test_in_turns(self):
        ways = [offloads.Way('memory'),
                offloads.Way('states', read=4_000_000, written=8_000_000),
                offloads.Way('parameters', read=8_000_000, written=8_000_000)]
        trainings = {'memory': Stub(5.0), 'states': Stub(9.0),
                     'parameters': Stub(12.0)}
        raw = Stub()
        milliseconds = {'4000000 0': 2.0, '0 8000000': 8.0,
                        '4000000 8000000': 7.0, '8000000 8000000': 13.0}

        def timed(_, line):
            raw.turn(line)
            return milliseconds[line]
        self.addCleanup(setattr, offloads, 'timed', offloads.timed)
        offloads.timed = timed
        setting = offloads.Setting('', '', '', rows.SMALL,
                                   ('states', 'parameters'), steps=3, rounds=2)
        rates = offloads.in_turns(setting, ways, trainings, raw)
        self.assertEqual(rates, [(4.0, 2.0)] * 2)  # of both ranks
        self.assertEqual([way.step for way in ways],
                         [[5.0] * 2, [9.0] * 2, [12.0] * 2])
        self.assertEqual((ways[1].apart, ways[2].apart),
                         ([10.0] * 2, [12.0] * 2))
        self.assertEqual((ways[1].transfer, ways[2].transfer),
                         ([7.0] * 2, [12.0] * 2))
        self.assertEqual(len(raw.told), 3 * 4)  # once to warm up
        self.assertTrue(all(t.pending == 0 for t in trainings.values()))

    def test_pairs_where_memory_is_short(self):
        setting = offloads.Setting('', '', '', rows.LARGE,
                                   ('states', 'parameters'), 3, 2)
        available = offloads.measure.memory_available
        self.addCleanup(setattr, offloads.measure, 'memory_available', available)
        for free, expected in ((64 << 30, [('states', 'parameters')]),
                               (6 << 30, [('states',), ('parameters',)])):
            offloads.measure.memory_available = lambda free=free: free
            self.assertEqual(offloads.groups(setting), expected)
        offloads.measure.memory_available = lambda: 4 << 30
        with self.assertRaisesRegex(SystemExit, 'GB of memory, 4.3 are'):
            offloads.groups(setting)

    def test_table(self):
        setting = offloads.Setting('', '', '', rows.LARGE, ('states',), 3, 9)
        one = outcome(100, 80, 95, 50)
        text = offloads.table(setting, [one])
        self.assertIn('| states on the disk | 100.0 ms | 50.0 ms | 80.0 ms | '
                      '80.0 ms | 95.0 ms | 0.800 | 0.800 to 0.800 | >= 0.9 | '
                      'NOT MET |', text)
        said = json.loads(json.dumps(offloads.as_json(setting, [one])))
        self.assertEqual(said['ways']['states']['efficiency'], [0.8] * 3)
        self.assertFalse(said['ways']['states']['met'])


class RawDiskTest(unittest.TestCase):

    def test_moves_every_block(self):
        calls = {'read': [], 'write': []}
        with tempfile.TemporaryDirectory() as folder:
            try:
                file = raw_disk.File(folder, 0)
            except OSError as error:
                self.assertEqual(error.errno, errno.EINVAL)
                self.skipTest('no O_DIRECT there')
            self.addCleanup(os.close, file.file)
            self.assertEqual(os.listdir(folder), [])
            file.grow(9)
            self.assertEqual(os.fstat(file.file).st_size, 9 << 20)

            def note(kind, call):
                def noted(fd, memory, at):
                    calls[kind].append(at >> 20)
                    return call(fd, memory, at)
                return noted
            for kind, name in (('read', 'preadv'), ('write', 'pwritev')):
                call = getattr(os, name)
                self.addCleanup(setattr, os, name, call)
                setattr(os, name, note(kind, call))
            file.move(9, 5)
            self.assertEqual(sorted(calls['read']), list(range(9)))
            self.assertEqual(sorted(calls['write']), [4, 5, 6, 7, 8])
            os.ftruncate(file.file, 3 << 20)
            with self.assertRaisesRegex(OSError, '0 bytes of 1048576'):
                file.move(9, 0)

    def test_takes_turns(self):
        program = os.path.join('benchmarks', 'peers_lib', 'raw_disk.py')
        with tempfile.TemporaryDirectory() as folder:
            try:
                os.close(raw_disk.File(folder, 0).file)
            except OSError:
                self.skipTest('no O_DIRECT there')
            with turns.trainings(
                    [('raw', [sys.executable, program, '--folder', folder], 2,
                      {})], turns.environment()) as (training,):
                self.assertGreater(offloads.timed(training, '1500000 1'), 0)
                training.end()
            with self.assertRaisesRegex(SystemExit, 'No such file'):
                with turns.trainings(
                        [('raw', [sys.executable, program, '--folder',
                                  f'{folder}/no'], 2, {})],
                        turns.environment()) as (training,):
                    training.turn('1 1')


if __name__ == '__main__':
    unittest.main()
