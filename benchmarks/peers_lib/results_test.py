#!/usr/bin/python3
"""Intervals, bounds of losses, tables and the file that keeps them."""
import json
import math
import os
import sys
import tempfile
import unittest

sys.path.insert(0, 'benchmarks/peers_lib')
import losses  # pylint: disable=wrong-import-position
import measure  # pylint: disable=wrong-import-position
import outcome  # pylint: disable=wrong-import-position
import ratios  # pylint: disable=wrong-import-position
import results  # pylint: disable=wrong-import-position
import rows  # pylint: disable=wrong-import-position


class RatiosTest(unittest.TestCase):

    def test_intervals(self):
        for n, low, high in ((6, 1, 6), (8, 1, 8), (9, 2, 8), (15, 4, 12),
                             (100, 40, 61)):
            values = list(range(n, 0, -1))
            self.assertEqual(ratios.median_interval(values), (low, high), n)

    def test_five_values_say_nothing(self):
        self.assertEqual(ratios.median_interval([1, 2, 3, 4, 5]),
                         (-math.inf, math.inf))
        self.assertFalse(ratios.Ratio([3] * 5, at_least=2).met)

    def test_the_whole_interval_counts(self):
        values = [1.9] * 3 + [2.1] * 12
        self.assertTrue(ratios.Ratio(values, at_least=2).met)
        values = [1.9] * 4 + [2.1] * 11
        self.assertFalse(ratios.Ratio(values, at_least=2).met)
        self.assertFalse(ratios.Ratio(values, at_most=2).met)
        self.assertTrue(ratios.Ratio(values, at_most=2.1).met)

    def test_without_a_goal_it_is_information(self):
        ratio = ratios.Ratio([0.1] * 15)
        self.assertTrue(ratio.met)
        self.assertEqual((ratio.goal, ratio.verdict), ('', ''))
        self.assertEqual(ratios.Ratio([0.1] * 15, at_least=1).verdict,
                         'NOT MET')

    def test_a_share_of_the_bound_does_not_hang_on_the_peer(self):
        goal = rows.of_the_bound(0.98)
        for slower in (1, 3):
            measured = {'stage3': [[10.0]] * 6, 'none': [[9.5]] * 6,
                        'fsdp2': [[10.0 * slower]] * 6}
            ours = measure.line_of(rows.ahead_of('fsdp2'), measured).ratio
            share = measure.line_of(goal, measured).ratio
            bound = slower * 10.0 / 9.5
            self.assertAlmostEqual(ours.median / bound, share.median)
            self.assertFalse(share.met)

    def test_spread_holds_all(self):
        spread = ratios.Spread([0.5, 0.4, 0.6], at_most=0.55)
        self.assertEqual((spread.low, spread.median, spread.high),
                         (0.4, 0.5, 0.6))
        self.assertFalse(spread.met)

    def test_turns_are_paired(self):
        self.assertEqual(
            ratios.of_turns([[9, 2, 3], [4, 4, 4]], [[1, 2, 1], [8, 1, 8]]),
            [3, 0.5])

    def test_four_ranks_have_twice_the_tokens(self):
        measured = {'stage3': [[10.0]] * 6, 'stage3_of_4': [[25.0]] * 6}
        goal = rows.Goal('stage3_of_4', 'stage3', 'tokens/s', at_least=0.9)
        self.assertEqual(measure.line_of(goal, measured).ratio.median, 0.8)
        goal = rows.Goal('stage3_of_4', 'stage3', 'step time', at_most=0.9)
        self.assertEqual(measure.line_of(goal, measured).ratio.median, 2.5)


class LossesTest(unittest.TestCase):

    def test_digits_are_no_difference(self):
        verdict = losses.Verdict([5.34534502], [5.345345020294189])
        self.assertTrue(verdict.ok)
        self.assertEqual(verdict.text, 'equal bits over 1 steps')

    def test_one_bit_is_one(self):
        self.assertFalse(losses.Verdict([4.0, 4.0], [4.0, 4.0000005]).ok)

    def test_bounds_never_fall(self):
        ulp = 2.0 ** -21
        self.assertEqual(losses.float32_ulp(-5.0), ulp)
        self.assertEqual(
            losses.bounds([5.0, 5.0, 4.0], [[5.0, 5.0 + 4 * ulp, 4.0]]),
            [8 * ulp, 32 * ulp, 32 * ulp])
        self.assertEqual(
            losses.bounds([5.0, 5.0], [[5.0, 5.0], [5.0 - 2 * ulp, 5.0]]),
            [16 * ulp, 16 * ulp])

    def test_bound(self):
        limits = [0.0, 0.25, 0.5]
        within = losses.Verdict([1, 2, 3], [1, 2.25, 3], limits)
        self.assertTrue(within.ok)
        self.assertIn('the first 1 of 3 steps, at most 1.00', within.text)
        beyond = losses.Verdict([1, 2, 3], [1, 2, 2.25], limits)
        self.assertFalse(beyond.ok)
        self.assertIn('FAILED: beyond', beyond.text)
        self.assertFalse(losses.Verdict([1, 2, 3], [1.5, 2, 3], limits).ok)

    def test_no_losses_are_no_proof(self):
        for ours, theirs in (([], []), ([1.0], []), ([1.0], [1.0, 2.0]),
                             ([math.nan], [math.nan]), ([1.0], [math.inf])):
            self.assertFalse(losses.Verdict(ours, theirs, [9.0]).ok)


class RowsTest(unittest.TestCase):

    def test_sizes(self):
        self.assertEqual(rows.LARGE.numel, 151_746_560)
        self.assertEqual(rows.NARROW.numel, 24 * 49_984 + 528 * 64 + 128)

    def test_sides_come_once(self):
        self.assertEqual(rows.ROWS[0].sides,
                         ['stage3', 'none', 'fsdp2', 'ds3', 'ddp', 'stage0'])

    def test_ours_alone_or_of_four_is_not_compared(self):
        self.assertEqual(
            [side for side in rows.TITLES if not measure.comparable(side)],
            ['none', 'stage3_of_4'])


    def test_engines_of_variants(self):
        self.assertEqual(
            [rows.engine_of(side) for side in
             ('ds3_nvme', 'ds3_nvmep', 'stage3_nvme', 'stage3_of_4', 'ds3')],
            ['ds3', 'ds3', 'stage3', 'stage3', 'ds3'])
        self.assertGreater(rows.bytes_per_parameter('ds3_nvmep'),
                           rows.bytes_per_parameter('ds3'))
        self.assertEqual(rows.bytes_per_parameter('stage3_nvme'),
                         rows.bytes_per_parameter('stage3'))

    def test_both_engines_get_a_folder_of_their_own(self):
        class Bench:
            train, data, disk, peers = 'train', 'text', '/disk', {}
        row = next(row for row in rows.ROWS if row.name == 'P')
        for side in row.sides:
            words = measure.command(side, row, Bench, 'init')[1]
            at = words.index('--parameters_on_disk')
            self.assertEqual(words[at + 1], f'/disk/{side}')
            self.assertNotIn('--states_on_disk', words)
        self.assertNotIn('--states_on_disk', measure.command(
            'stage3', row, Bench, 'init')[1])

    def test_offload_is_speed_and_memory(self):
        row = next(row for row in rows.ROWS if row.name == 'N')
        asked = []
        self.addCleanup(setattr, measure, 'said_by', measure.said_by)
        measure.said_by = lambda words, more: asked.append(words[1])

        def fake(kind):
            def run(part, bench):
                asked.append((kind, part.sides, [g.what for g in part.goals]))
                self.assertTrue(os.path.isdir(bench.disk))
                self.assertEqual(os.path.dirname(bench.disk), folder)
                return measure.Result(part, [kind], [kind], {kind: 1})
            return run
        for kind in ('speed', 'memory'):
            self.addCleanup(setattr, measure, kind, getattr(measure, kind))
            setattr(measure, kind, fake(kind))
        with tempfile.TemporaryDirectory() as folder:
            bench = outcome.Bench(*[''] * 4, data='', peers={}, folder='',
                                  rounds=1, small=False, loss_steps=None,
                                  disk=folder)
            result = measure.offload(row, bench)
            self.assertEqual(os.listdir(folder), [])
        self.assertEqual(asked, [
            '-c', ('speed', ['stage3_nvme', 'ds3_nvme'], ['tokens/s']),
            ('memory', ['stage3_nvme', 'ds3_nvme'], ['memory'])])
        self.assertEqual(result.lines, ['speed', 'memory'])
        self.assertEqual(result.row, row)


class CompareTest(unittest.TestCase):

    def fails(self, limits=None, clip=0, **of_sides):
        """Whether a row fails with these losses."""
        class Training:
            def __init__(self, name, values):
                self.name, self.losses = name, values
        started = [Training(*item) for item in of_sides.items()]
        row = rows.Row('X', 'speed', rows.SMALL, clip=clip)
        result = measure.Result(row)
        reference = next(t for t in started if t.name == 'stage3').losses
        measure.compare_losses(started, reference, limits, result)
        self.assertEqual(len(result.notes), len(started) - 1)
        return result.failed

    def test_bits(self):
        ours = [4.0, 3.0]
        far = [9.0, 9.0]
        for side in ('stage0', 'ddp', 'fsdp2'):
            self.assertFalse(self.fails(stage3=ours, **{side: [4.0, 3.0]}))
            self.assertTrue(
                self.fails(far, stage3=ours, **{side: [4.0, 3.0000005]}))
        self.assertFalse(self.fails(far, stage3=ours, ds3=[4.5, 3.5]))
        self.assertTrue(self.fails([0.25, 0.5], stage3=ours, ds3=[4.5, 3.5]))
        self.assertFalse(self.fails(far, 1.0, stage3=ours, fsdp2=[4.5, 3.5]))

    def test_those_who_train_otherwise_begin_alike(self):
        for side in ('none', 'stage3_of_4'):
            self.assertFalse(self.fails(stage3=[4.0, 3.0], **{side: [4.0, 2.0]}))
            self.assertTrue(self.fails(stage3=[4.0, 3.0], **{side: [4.5, 3.0]}))
            self.assertTrue(self.fails(stage3=[4.0, 3.0], **{side: [math.nan]}))


def result_of(row, values, failed=False):
    goal = row.goals[0]
    ratio = ratios.Ratio(values, goal.at_least, goal.at_most)
    return measure.Result(row, [measure.Line(goal, ratio, [2.0], [5.0])],
                          ['A note.'], {'turns': {}}, failed)


class ResultsTest(unittest.TestCase):

    def test_table(self):
        text = results.table(result_of(rows.ROWS[0], [2.5] * 15))
        self.assertIn('| Tessera, stage 3 | no communication | tokens/s | >= 0.98 | '
                      '2.500 | 2.500 to 2.500 | met | 2.0 (2.0) ms | '
                      '5.0 (5.0) ms |', text)
        text = results.table(result_of(rows.ROWS[0], [0.5] * 15))
        self.assertIn('| NOT MET |', text)

    def test_wrong_losses_fail_whatever_the_speed(self):
        self.assertFalse(result_of(rows.ROWS[0], [9.0] * 15, failed=True).met)
        self.assertTrue(result_of(rows.ROWS[0], [9.0] * 15).met)

    def test_machine(self):
        with tempfile.NamedTemporaryFile('w') as file:
            file.write('processor\t: 0\nmodel name\t: Some CPU (R)\n'
                       'cpu family\t: 6\nmodel\t\t: 7\nflags\t\t: sse avx2\n'
                       'processor\t: 1\nmodel name\t: Some CPU (R)\n')
            file.flush()
            words = results.machine(file.name)
        self.assertEqual(words, 'Some CPU (R) (family 6, model 7), 2 CPUs, avx2')
        self.assertEqual(results.slug(words),
                         'some-cpu-r-family-6-model-7-2-cpus-avx2')

    def test_newer_rows_take_the_place_of_older(self):
        a, b, c = (rows.ROWS[i] for i in (0, 1, 2))
        with tempfile.TemporaryDirectory() as folder:
            results.keep(folder, 'x', [result_of(c, [2.0] * 15)], 'first')
            results.keep(folder, 'x', [result_of(a, [2.0] * 15)], 'second')
            results.keep(folder, 'x', [result_of(c, [3.0] * 15)], 'third')
            path = results.keep(
                folder, 'x', [result_of(b, [2.0] * 15)], 'fourth')
            text = results.read(path)
            raw = json.loads(results.read(os.path.join(folder, 'x.json')))
        self.assertNotIn('first', text)
        places = [text.index(stamp) for stamp in ('second', 'fourth', 'third')]
        self.assertEqual(places, sorted(places))
        self.assertEqual(list(raw), ['A', 'B', 'C'])


if __name__ == '__main__':
    unittest.main()
