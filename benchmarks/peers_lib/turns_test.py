#!/usr/bin/python3
"""Do trainings take turns, and does one that fails leave anything behind?"""
import os
import select
import sys
import tempfile
import unittest

sys.path.insert(0, 'benchmarks/peers_lib')
import turns  # pylint: disable=wrong-import-position

# A training of no model. Its loss is the process that it has started.
FAKE = '''
import json, os, subprocess, sys
mode, rank = sys.argv[1], int(os.environ['RANK'])
def say(**line):
    print(json.dumps(line), flush=True)
if mode == 'dies first':
    sys.exit('rank %d has no libraries' % rank)
say(ms=[], loss=[])
sys.stdin.readline()
child = subprocess.Popen(['sleep', '1000'])
for line in sys.stdin:
    if mode == 'dies' and rank == 0:
        sys.exit('too heavy a model')  # its child keeps the output open
    if mode == 'rank 1 dies' and rank == 1:
        sys.exit('only rank 1 is ill')
    if mode == 'is silent' or mode == 'rank 1 dies':
        continue
    if mode == 'rubbish' and rank == 1:
        print('no JSON', flush=True)
    if mode == 'rank 1 lags' and rank == 1:
        subprocess.run(['sleep', '0.3'])
        open(sys.argv[2], 'a').close()
    say(ms=[1.5] * int(line), loss=[child.pid])
child.kill()
if rank == 0:
    print('{"world": %s}' % os.environ['WORLD_SIZE'])
if mode == 'ends badly' and rank == 1:
    sys.exit('could not end')
'''


class TurnsTest(unittest.TestCase):

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.program = os.path.join(folder.name, 'fake.py')
        self.mark = os.path.join(folder.name, 'mark')
        with open(self.program, 'w', encoding='utf-8') as file:
            file.write(FAKE)

    def of(self, *modes):
        return turns.trainings(
            [(mode, ['/usr/bin/python3', self.program, mode, self.mark], 2, {})
             for mode in modes], turns.environment())

    def test_interleaves_and_ends(self):
        with self.of('a', 'b') as started:
            taken = turns.interleave(started, 3, 2)
            self.assertEqual(taken, {'a': [[1.5] * 3] * 2, 'b': [[1.5] * 3] * 2})
            self.assertEqual([t.end() for t in started], [{'world': 2}] * 2)

    def test_waits_for_all_ranks(self):
        with self.of('rank 1 lags') as (training,):
            training.turn(1)
            self.assertTrue(os.path.exists(self.mark))

    def test_orders_differ(self):
        order = []

        class Stub:
            def __init__(self, name):
                self.name = name

            def turn(self, steps):
                order.append(self.name + str(steps))
                return [steps]
        turns.interleave([Stub('a'), Stub('b'), Stub('c')], 5, 8)
        rounds = [tuple(order[i:i + 3]) for i in range(0, 24, 3)]
        for one in rounds:
            self.assertEqual(sorted(one), ['a5', 'b5', 'c5'])
        self.assertGreater(len(set(rounds)), 3)

    def test_first_steps_do_not_count_and_the_disk_rests(self):
        class Stub:
            name, moved = 'a', 0

            def turn(self, steps):
                self.moved += steps
                return list(range(steps))

            def settle(self):
                self.moved = 0
        stub = Stub()
        self.assertEqual(turns.interleave([stub], 3, 2, uncounted=1),
                         {'a': [[1, 2]] * 2})
        self.assertEqual(stub.moved, 0)
        turns.interleave([stub], 3, 2)
        self.assertEqual(stub.moved, 6)

    def quietly(self, series, limit):
        """Looks that settle takes at a training that has moved so much."""
        self.addCleanup(setattr, turns, 'QUIET', turns.QUIET)
        self.addCleanup(setattr, turns, 'QUIET_LIMIT', turns.QUIET_LIMIT)
        turns.QUIET, turns.QUIET_LIMIT = 0, limit
        training = turns.Training('a', [], 2, {})
        self.addCleanup(training.log.close)
        left = list(series)
        training.moved = lambda: left.pop(0)
        training.settle()
        return len(series) - len(left)

    def test_settles_when_nothing_moves(self):
        self.assertEqual(self.quietly([1, 2, 3, 3, 4], limit=60), 4)
        with self.assertRaisesRegex(SystemExit, 'still reads or writes'):
            self.quietly([1, 2, 3], limit=-1)

    def test_bytes_moved(self):
        with self.of('a') as (training,):
            read, written = zip(*training.moved())
            self.assertTrue(all(0 <= n < 1 << 40 for n in read + written))

    def test_watches_memory(self):
        with self.of('a') as (training,):
            training.watched_turn(1)
            self.assertGreater(training.baseline, 1 << 20)

    def fails(self, mode, *words):
        """A turn of `mode` ends in one message with all of `words`."""
        with self.assertRaises(SystemExit) as caught:
            with self.of('good', mode) as started:
                started[0].turn(1)
                good = os.pidfd_open(started[0].losses[0])
                self.addCleanup(os.close, good)
                started[1].turn(1)
        for word in (f'peers: {mode} ', *words):
            self.assertIn(word, str(caught.exception))
        # What the other one had started has ended too.
        self.assertTrue(select.select([good], [], [], 60)[0])

    def test_dying_training(self):
        self.fails('dies', 'lost rank 0', 'too heavy a model')

    def test_dying_rank(self):
        self.fails('rank 1 dies', 'lost rank 1', 'ended with 1',
                   'only rank 1 is ill')

    def test_rubbish(self):
        self.fails('rubbish', "'no JSON'] instead of")

    def test_silence(self):
        with self.assertRaises(SystemExit) as caught:
            with self.of('is silent') as (training,):
                self.addCleanup(setattr, turns, 'TURN_LIMIT', turns.TURN_LIMIT)
                turns.TURN_LIMIT = 0
                training.turn(1)
        self.assertIn('peers: is silent did not answer', str(caught.exception))

    def test_dying_before_its_first_line(self):
        with self.assertRaises(SystemExit) as caught:
            with self.of('dies first'):
                pass
        self.assertRegex(str(caught.exception), 'rank . has no libraries')

    def test_bad_end(self):
        with self.assertRaises(SystemExit) as caught:
            with self.of('ends badly') as (training,):
                training.turn(1)
                training.end()
        self.assertIn('rank 1 that ended with 1', str(caught.exception))
        self.assertIn('could not end', str(caught.exception))


if __name__ == '__main__':
    unittest.main()
