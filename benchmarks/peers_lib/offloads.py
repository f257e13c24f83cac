"""Training with states, or parameters too, on a disk, beside its two bounds.

A step with offload has to compute what the same step computes without, and to
move its bytes: what it reads and what it writes. Both can run at once, so the
larger is its bound, and efficiency is that bound over the step. In the same
rounds are measured: the training without offload, and bare transfers of as many
bytes (raw_disk.py), by as many ranks. These are done in two ways, reads after
writes and both at once; the faster is the bound, since a disk that can do one
of them needs no longer than that.
"""
import contextlib
import dataclasses
import os
import random
import statistics
import sys
import tempfile
import time

import losses
import measure
import ratios
import rows
import turns

WORLD = measure.WORLD
WARM_UP = 4  # steps, during which memory is watched
# The last word is followed by a folder.
FLAGS = {'memory': (), 'states': ('--states_on_disk',),
         'parameters': ('--parameters_on_disk',),
         'clipping': ('--clip=1e9', '--states_on_disk'),
         'late': ('--clip=1e9', '--noearly_step', '--states_on_disk')}
TITLES = {'memory': 'all in memory', 'states': 'states on the disk',
          'parameters': 'parameters and states on the disk',
          'clipping': 'states on the disk, clipping that never clips',
          'late': 'the same, no unit is stepped before Step'}
# Of a rank, for each parameter of the model, and for its libraries.
BYTES_PER_PARAMETER = {'memory': 9.5, 'states': 7, 'parameters': 6,
                       'clipping': 7, 'late': 6}
BYTES_OF_LIBRARIES = 200 << 20
# Of clipping: what stepping early costs.
GOALS = {'states': 0.9, 'parameters': 0.85, 'clipping': 0.97}
BESIDE = {'states': 'memory', 'parameters': 'memory', 'clipping': 'late'}
HEAD = ('', 'step', 'without offload', 'transfer', 'reads, then writes',
        'both at once', 'efficiency', 'interval', 'goal', '',
        'read, written', 'memory')


@dataclasses.dataclass
class Setting:
    train: str  # the program
    data: str
    disk: str  # a folder, for files that go with the run
    model: rows.Model
    ways: tuple  # of GOALS
    steps: int  # of a turn
    rounds: int


@dataclasses.dataclass
class Way:
    """Milliseconds by round; bytes of a rank, of a step or at its peak."""
    name: str
    peak: float = 0
    read: int = 0
    written: int = 0
    step: list = dataclasses.field(default_factory=list)
    apart: list = dataclasses.field(default_factory=list)  # transfers, bare
    at_once: list = dataclasses.field(default_factory=list)

    @property
    def transfer(self):
        return [min(pair) for pair in zip(self.apart, self.at_once)]


@dataclasses.dataclass
class Outcome:
    """Of one offloaded way."""
    way: Way
    without: Way
    verdict: losses.Verdict  # its losses against those without
    rates: list  # (read, written) GB/s of all ranks, by round

    @property
    def efficiency(self):
        if self.way.name == 'clipping':
            return ratios.Ratio(
                [late / step for late, step
                 in zip(self.without.step, self.way.step)],
                at_least=GOALS['clipping'])
        return ratios.Ratio(
            [max(compute, transfer) / step for compute, transfer, step
             in zip(self.without.step, self.way.transfer, self.way.step)],
            at_least=GOALS[self.way.name])

    @property
    def met(self):
        return self.verdict.ok and self.efficiency.met


def beside(ways):
    """These, behind what they are compared with."""
    return [*dict.fromkeys(BESIDE[way] for way in ways), *ways]


def groups(setting):
    """What runs together: all, or each beside what it is compared with."""
    def need(ways):
        return sum(WORLD * (BYTES_PER_PARAMETER[way] * setting.model.numel
                            + BYTES_OF_LIBRARIES) for way in beside(ways))
    available = measure.memory_available()
    if need(setting.ways) <= 0.9 * available:
        return [setting.ways]
    largest = max(need((way,)) for way in setting.ways)
    if largest > available:
        raise SystemExit(f'offload: {setting.model}: needs {largest / 1e9:.1f} GB '
                         f'of memory, {available / 1e9:.1f} are available')
    return [(way,) for way in setting.ways]


def run(setting):
    """An Outcome of each way."""
    outcomes = []
    for ways in groups(setting):
        with tempfile.TemporaryDirectory(prefix='offload.',
                                         dir=setting.disk) as folder:
            outcomes += run_group(setting, ways, folder)
    return outcomes


def run_group(setting, names, folder):
    ways = {name: Way(name) for name in beside(names)}
    with contextlib.ExitStack() as stack:
        trainings = {way.name: begin(setting, way, folder, stack)
                     for way in ways.values()}
        program = os.path.join(os.path.dirname(os.path.abspath(__file__)),
                               'raw_disk.py')
        (raw,) = stack.enter_context(turns.trainings(
            [('bare transfers', [sys.executable, program, '--folder', folder],
              WORLD, {})], turns.environment()))
        rates = in_turns(setting, list(ways.values()), trainings, raw)
        verdicts = {name: losses.Verdict(trainings[BESIDE[name]].losses,
                                         trainings[name].losses)
                    for name in names}
        for training in (*trainings.values(), raw):
            training.end()
    return [Outcome(ways[name], ways[BESIDE[name]], verdicts[name], rates)
            for name in names]


def begin(setting, way, folder, stack):
    """The way's training, warm; what it holds, and what a step of it moves."""
    flags = FLAGS[way.name]
    words = [setting.train, *setting.model.options(), '--data', setting.data,
             '--stage', '3', '--turns',
             *flags, *([os.path.join(folder, way.name)] if flags else [])]
    (training,) = stack.enter_context(turns.trainings(
        [(TITLES[way.name], words, WORLD, {})], turns.environment()))
    training.watched_turn(WARM_UP)
    way.peak = (training.peak - training.baseline) / WORLD
    training.settle()
    before = training.moved()
    training.turn(setting.steps)
    training.settle()
    way.read, way.written = (
        sum(after[i] - start[i] for start, after
            in zip(before, training.moved())) // (setting.steps * WORLD)
        for i in range(2))
    if flags and not (way.read and way.written):
        raise SystemExit(f'offload: {TITLES[way.name]}: a step reads {way.read} '
                         f'bytes and writes {way.written}: the model is too '
                         'small, or the folder is on no disk')
    return training


def in_turns(setting, ways, trainings, raw):
    """Fills the ways' lists; returns the rates of each round."""
    def step(way):
        return mean_step(trainings[way.name], setting.steps)

    def bare(reads, writes):
        return timed(raw, f'{reads} {writes}')

    offloaded = [way for way in ways if FLAGS[way.name]]
    one = offloaded[0]
    turn_of = {('step', way.name): (step, way) for way in ways}
    turn_of.update({('both', way.name): (bare, way.read, way.written)
                    for way in offloaded})
    turn_of['read'] = (bare, one.read, 0)
    turn_of['write'] = (bare, 0, one.written)
    for kind, (call, *arguments) in turn_of.items():
        if call is bare:  # its file grows
            call(*arguments)
    order, shuffled, rates = list(turn_of), random.Random(1), []
    for _ in range(setting.rounds):
        # In another order each time, so that nobody always follows the same one.
        shuffled.shuffle(order)
        taken = {kind: turn_of[kind][0](*turn_of[kind][1:]) for kind in order}
        reading, writing = taken['read'] / one.read, taken['write'] / one.written
        rates.append((WORLD / reading / 1e6, WORLD / writing / 1e6))
        for way in ways:
            way.step.append(taken['step', way.name])
        for way in offloaded:
            way.apart.append(way.read * reading + way.written * writing)
            way.at_once.append(taken['both', way.name])
    return rates


def mean_step(training, steps):
    """Milliseconds. A step's update runs behind the next step: so the first of a
    turn, which has none before it, does not count, and the disk is at rest
    again before somebody else's turn."""
    taken = training.turn(steps)[1:]
    training.settle()
    return statistics.mean(taken)


def timed(raw, line):
    start = time.perf_counter()
    raw.turn(line)
    return 1e3 * (time.perf_counter() - start)


# ---- what is printed


def cells(outcome):
    way, efficiency = outcome.way, outcome.efficiency

    def ms(values):
        return f'{statistics.median(values):.1f} ms'
    return (TITLES[way.name], ms(way.step), ms(outcome.without.step),
            ms(way.transfer), ms(way.apart), ms(way.at_once),
            f'{efficiency.median:.3f}',
            f'{efficiency.low:.3f} to {efficiency.high:.3f}', efficiency.goal,
            efficiency.verdict,
            f'{way.read / 1e6:.1f}, {way.written / 1e6:.1f} MB',
            f'{way.peak / 1e6:.0f} MB, {outcome.without.peak / 1e6:.0f} without')


def table(setting, outcomes):
    """In Markdown."""
    lines = [f'### Offload: {setting.model}, fp32, {WORLD} ranks', '',
             '| ' + ' | '.join(HEAD) + ' |', '|' + '---|' * len(HEAD),
             *('| ' + ' | '.join(cells(one)) + ' |' for one in outcomes), '']
    for one in outcomes:
        read, written = (statistics.median(rate) for rate in zip(*one.rates))
        slower = ratios.Ratio([a / b for a, b in
                               zip(one.way.step, one.without.step)])
        lines.append(
            f'- {TITLES[one.way.name]}: a step takes {slower.median:.3f} '
            f'({slower.low:.3f} to {slower.high:.3f}) of: '
            f'{TITLES[one.without.name]}; losses: {one.verdict.text}. The disk alone read {read:.2f} GB/s '
            f'and wrote {written:.2f}.')
    lines += [
        '- efficiency: the larger of compute (the step without offload) and '
        'transfer, over the step. transfer: bare reads and writes of as many '
        'bytes by as many ranks, blocks of 1 MiB, 8 under way, O_DIRECT; the '
        'faster of the next two. Of clipping: the step of those that are not '
        'stepped before Step, over the step.',
        '- read, written: by a rank in a step, as the kernel counts. memory: '
        'peak of a rank beyond its loaded libraries, proportional set size.']
    return '\n'.join(lines) + '\n'


def as_json(setting, outcomes):
    """For json.dumps."""
    return {
        'benchmark': 'offload', 'world': WORLD, 'rounds': setting.rounds,
        'model': dataclasses.asdict(setting.model),
        'parameters': setting.model.numel,
        'ways': {one.way.name: {
            **dataclasses.asdict(one.way), 'without': one.without.step,
            'peak_without': one.without.peak, 'gb_s': one.rates,
            'efficiency': [one.efficiency.low, one.efficiency.median,
                           one.efficiency.high],
            'goal': GOALS[one.way.name], 'losses': one.verdict.text,
            'met': one.met} for one in outcomes}}
