"""Trainings of gpu_check: speed, memory and bits, in turns on one GPU."""
import collections
import json
import os
import statistics
import sys
import tempfile
import time

from gpu_context import HERE, RUN, Failed

sys.path.insert(0, os.path.join(HERE, 'benchmarks'))
import turns  # noqa: E402 pylint: disable=wrong-import-position

PYTHON = os.environ.get('TESSERA_PYTHON', 'python3')
DATA = os.path.join(HERE, 'LICENSE')  # any text
WARM_UP = 3  # steps before the first round
END_SECONDS = 10  # that trainings may take to end
# TFLOP/s of bfloat16 without sparsity, by NVIDIA's data sheets; the first name
# that is in the GPU's.
PEAKS = (('GH200', 989), ('H200', 989), ('H100 PCIe', 756), ('H100 NVL', 835),
         ('H100', 989), ('B200', 2250), ('A100', 312), ('L40S', 362))
# For sums that are the same in each run.
SAME_BITS = {'CUBLAS_WORKSPACE_CONFIG': ':4096:8'}


class Size:
    """Of the GPT: some 1 B parameters, fewer where four do not fit the GPU."""

    def __init__(self, gpu, trainings=4):
        self.layers, self.dim, self.heads, self.seq = 2, 64, 2, 32
        self.rounds, self.steps, self.micro_batch = 2, 2, 2
        if gpu is None:
            return
        self.dim, self.heads, self.seq = 2048, 16, 1024
        self.rounds, self.steps = 6, 5
        # 20 bytes a parameter (masters, states, gradients, a copy), and what
        # does not depend on the number of layers.
        layer = 20 * 12 * self.dim**2
        room = 0.92 * gpu.memory / trainings - 4e9
        self.layers = max(1, min(20, int(room / layer)))

    def flags(self, *more):
        return [word for name in ('layers', 'dim', 'heads', 'seq') + more
                for word in ('--' + name, str(getattr(self, name)))]

    def config(self, stage, **sections):
        """The configuration of bench_train's flags, with these sections."""
        zero = {'stage': stage, **sections.pop('zero_optimization', {})}
        return {
            'train_micro_batch_size_per_gpu': self.micro_batch,
            'gradient_clipping': 0,
            'optimizer': {'type': 'AdamW',
                          'params': {'lr': 1e-3, 'weight_decay': 0.01}},
            'bf16': {'enabled': True},
            'communication_data_type': 'fp32',
            'zero_optimization': zero,
            **sections,
        }

    def __str__(self):
        return ('GPT of %.2f M parameters (%d layers, width %d), bf16, %d x %d '
                'tokens a step' % (12e-6 * self.layers * self.dim**2,
                                   self.layers, self.dim, self.micro_batch,
                                   self.seq))


def ours(size, context, *more):
    own = size.flags() if '--config' in more else [
        '--dtype', 'bf16', *size.flags('micro_batch')]
    return [RUN, 'bench_train', '--turns', '--data', DATA,
            '--device', 'gpu' if context.gpu else 'cpu', '--device_init',
            '--peak_tflops', str(peak_tflops(context.gpu)), *own, *more]


def peak_tflops(gpu):
    """0 if it is not known."""
    return next((peak for name, peak in PEAKS if gpu and name in gpu.name), 0)


def fsdp2(size, context):
    return [PYTHON, os.path.join(HERE, 'benchmarks', 'train_peer.py'),
            '--engine', 'fsdp2', '--data', DATA, '--bf16', '--device',
            'cuda' if context.gpu else 'cpu', '--device_init',
            *size.flags('micro_batch')]


def configured(context, size, name, stage, **sections):
    """ours() with these sections of a configuration, in a file of that name."""
    path = '%s.%s.json' % (context.log, name)
    with open(path, 'w', encoding='utf-8') as file:
        json.dump(size.config(stage, **sections), file)
    return ours(size, context, '--config', path)


def figures_of(end):
    """Of use and memory, from what a training says at its end.

    Those of steps are of all after the warm-up, the first two.
    """
    words = []
    if end.get('mfu') is not None:
        words.append('%.3f of the peak (MFU, by 6 N + 12 L d T)' % end['mfu'])
    if end.get('device'):
        words.append('allocated %.2f GB at the peak, reserved %.2f GB' % (
            end['device']['allocated_peak'] / 1e9,
            end['device']['reserved'] / 1e9))
    if end.get('engine') == 'tessera':
        words.append('ledger: %.4f GB at a step\'s peak; peaks of %s' % (
            end['activations']['ledger_at_peak'] / 1e9, ', '.join(
                '%s %.4f' % (kind, count / 1e9)
                for kind, count in end['bytes_at_peak'].items())))
    return words


def take_turns(context, size, commands, alike=False):
    """Figures of trainings [(name, command, environment)], the first one 1.00.

    Losses of stages are compared, or, if all are to be `alike`, all of ours.
    """
    figures, rounds = [str(size)], []
    if context.gpu is None:
        figures.append('on the CPU: this shows that it runs, and no more')
    turns.TURN_LIMIT = context.left()
    all_commands = [(name, command, 1, env) for name, command, env in commands]
    try:
        with turns.trainings(all_commands, dict(os.environ)) as started:
            turns.interleave(started, WARM_UP, 1)
            for _ in range(size.rounds):
                begin = time.monotonic()
                rounds.append(turns.interleave(started, size.steps, 1))
                took = time.monotonic() - begin
                if begin + 2 * took + END_SECONDS > context.deadline:
                    break
            ends = {training.name: training.end() for training in started}
            losses = {training.name: training.losses for training in started}
    except SystemExit as end:
        context.note(str(end))
        raise Failed(' | '.join(str(end).splitlines()[-4:])) from None
    medians = {name: [statistics.median(turn[name][0]) for turn in rounds]
               for name in ends}
    first = next(iter(medians.values()))
    for name, each in medians.items():
        context.note('%s: %s' % (name, each))
        middle = statistics.median(each)
        figures.append(
            '%s: %.2f ms a step (%.2f to %.2f), %.0f tokens/s, %.3f of the '
            'first one\'s time' % (
                name, middle, min(each), max(each),
                1e3 * size.micro_batch * size.seq / middle,
                statistics.median(a / b for a, b in zip(each, first))))
        figures += ['%s: %s' % (name, text) for text in figures_of(ends[name])]
    figures.append('%d rounds of %d steps' % (len(rounds), size.steps))
    return figures + same_losses(losses, alike)


def same_losses(losses, alike=False):
    """Whether those of stages are the same bits: {"stage N, how": losses}."""
    figures, by_way = [], {}
    for name, each in losses.items():
        stage, _, way = name.partition(', ')
        if stage.startswith('stage '):
            by_way.setdefault('' if alike else way, {})[name] = each
    for stages in by_way.values():
        if len(stages) < 2:
            continue
        first, expected = next(iter(stages.items()))
        differ = [i for each in stages.values()
                  for i, (a, b) in enumerate(zip(each, expected)) if a != b]
        figures.append('losses of %s: %s' % (
            '; '.join(stages), 'not those of %s from step %d on' % (
                first, min(differ)) if differ else
            'the same bits in %d steps' % len(expected)))
    return figures


def speed(context):
    """Beside libtorch at the same work: a model in bfloat16, float32 masters."""
    size = Size(context.gpu, trainings=5)
    commands = [('plain libtorch', ours(size, context, '--engine', 'plain_bf16'),
                 {}),
                ('plain libtorch, autocast',
                 ours(size, context, '--engine', 'none'), {}),
                ('stage 0', ours(size, context, '--stage', '0'), {}),
                ('stage 3', ours(size, context, '--stage', '3'), {})]
    code, _ = context.code_and_output(
        PYTHON, '-c', 'import torch.distributed.fsdp')
    if code == 0:
        commands.append(('FSDP2', fsdp2(size, context), {}))
    figures = take_turns(context, size, commands)
    if code != 0:
        figures.append('FSDP2: skipped: %s cannot import torch' % PYTHON)
    return figures


def clipping(context):
    context.need_gpu()
    size = Size(context.gpu)
    return take_turns(context, size, [
        ('stage 3', ours(size, context), {}),
        ('stage 3, clipping', ours(size, context, '--clip', '1'), {})])


def peaks(context):
    context.need_gpu()
    size = Size(context.gpu)
    size.rounds = 1
    stages = [('stage %d' % stage, ours(size, context, '--stage', str(stage)), {})
              for stage in (0, 2, 3)]
    name, command, _ = stages[-1]
    return take_turns(context, size, stages + [
        (name + ', expandable segments', command,
         {'PYTORCH_ALLOC_CONF': 'expandable_segments:True'})])


def deterministic(context):
    """What the same bits in each run cost, with fused attention."""
    context.need_gpu()
    size = Size(context.gpu, trainings=3)
    commands = []
    for stage, mode in (3, 'auto'), (0, 'on'), (3, 'on'):
        commands.append(('stage %d, deterministic %s' % (stage, mode),
                         configured(context, size, '%d.%s' % (stage, mode),
                                    stage, sharding={'deterministic': mode}),
                         SAME_BITS))
    return take_turns(context, size, commands)


def shard_alone(context):
    """What gathering and freeing all parameters costs, on one card."""
    context.need_gpu()
    size = Size(context.gpu, trainings=2)
    return take_turns(context, size, [
        ('plain libtorch', ours(size, context, '--engine', 'plain_bf16'), {}),
        ('stage 3, gathered',
         configured(context, size, 'alone', 3, sharding={'shard_alone': True}),
         {})])


def recompute(context):
    """Blocks computed again in backward: their memory, time and bits."""
    context.need_gpu()
    size = Size(context.gpu, trainings=3)
    same = {'deterministic': 'on'}
    commands = [('stage 3', configured(context, size, 'kept', 3, sharding=same),
                 SAME_BITS)]
    for policy in 'selective', 'full':
        commands.append(('stage 3 recomputing, ' + policy, configured(
            context, size, policy, 3, sharding=same, activation_checkpointing={
                'units': ['PeerBlock'], 'policy': policy}), SAME_BITS))
    return take_turns(context, size, commands, alike=True)


def offload(context):
    """States, then parameters, too, in the host's memory."""
    context.need_gpu()
    size = Size(context.gpu, trainings=4)
    size.steps = 3
    cpu = {'device': 'cpu'}
    all_processors = {'OMP_NUM_THREADS': str(len(os.sched_getaffinity(0)))}
    commands = [
        ('stage 3', ours(size, context), {}),
        ('stage 3, states on the host', configured(
            context, size, 'states', 3,
            zero_optimization={'offload_optimizer': cpu}), all_processors),
        ('stage 3, parameters, too', configured(
            context, size, 'parameters', 3,
            zero_optimization={'offload_optimizer': cpu, 'offload_param': cpu}),
         all_processors)]
    code, _ = context.code_and_output(
        PYTHON, '-c', 'import torch.distributed.fsdp')
    if code == 0:
        commands.append(('FSDP2, CPUOffloadPolicy',
                         fsdp2(size, context) + ['--cpu_offload'],
                         all_processors))
    return take_turns(context, size, commands)


def offload_disk(context):
    """States in files: of fewer layers, since each step moves all of them."""
    context.need_gpu()
    size = Size(context.gpu, trainings=2)
    size.layers, size.rounds, size.steps = min(size.layers, 4), 2, 2
    with tempfile.TemporaryDirectory() as folder:
        return take_turns(context, size, [
            ('stage 3', ours(size, context), {}),
            ('stage 3, states on a disk', configured(
                context, size, 'disk', 3, zero_optimization={
                    'offload_optimizer': {'device': 'nvme', 'nvme_path': folder}}),
             {'OMP_NUM_THREADS': str(len(os.sched_getaffinity(0)))})])


def two_ranks(context):
    """Over gloo, on one GPU: bench_train, and what it says if it fails."""
    context.need_gpu()
    size = Size(context.gpu, trainings=4)
    size.layers = min(size.layers, 4)
    said = context.run(
        RUN, 'bench_train', '--world=2', '--backend', 'gloo', '--device', 'gpu',
        '--device_init', '--data', DATA, '--dtype', 'bf16', '--steps', '4',
        *size.flags('micro_batch'))
    return said.strip().splitlines()[-2:]


def figures_of_kernels(events):
    """Of one step's events of Kineto: busy time, launches, the dearest kernels."""
    kernels = [(e['ts'], e['dur'], e['name']) for e in events
               if e.get('cat') in ('kernel', 'gpu_memcpy', 'gpu_memset')]
    if not kernels:
        raise Failed('the trace has no kernel')
    kernels.sort()
    busy, end = 0, kernels[0][0]
    for begin, took, _ in kernels:
        busy += max(0, begin + took - max(begin, end))
        end = max(end, begin + took)
    whole = end - kernels[0][0]
    figures = ['the device is busy for %.2f of %.2f ms (%.3f), %d launches' % (
        busy / 1e3, whole / 1e3, busy / whole, len(kernels))]
    by_name = collections.Counter()
    for _, took, name in kernels:
        by_name[name] += took
    return figures + ['%.2f ms: %s' % (took / 1e3, name[:90])
                      for name, took in by_name.most_common(10)]


def kernels(context):
    """One step of stage 3 by libtorch's profiler."""
    context.need_gpu()
    size = Size(context.gpu, trainings=1)
    folder = context.log + '.trace'
    command = configured(context, size, 'trace', 3, trace={
        'enabled': True, 'start_step': 4, 'end_step': 4, 'kineto': True,
        'output_path': folder})
    command.remove('--turns')
    context.run(*command, '--steps', '5')
    with open(folder + '/kineto.rank0.json', encoding='utf-8') as file:
        return [str(size)] + figures_of_kernels(json.load(file)['traceEvents'])
