"""What is compared: models, sides, goals. Plain data; see measure.py."""
import dataclasses

# Bytes that a rank needs at most, for each parameter (MemAvailable is compared
# with them, so that what does not fit is run in pairs).
BYTES_PER_PARAMETER = {'stage0': 20, 'stage1': 16, 'stage2': 14, 'stage3': 12,
                       'none': 18, 'ddp': 20, 'fsdp1': 20, 'fsdp2': 14,
                       'ds1': 32, 'ds2': 32, 'ds3': 32, 'ds3_nvme': 40,
                       'ds3_nvmep': 46}
BYTES_OF_LIBRARIES = 500 << 20  # of a rank
TITLES = {'stage0': 'Tessera, stage 0', 'stage1': 'Tessera, stage 1',
          'stage2': 'Tessera, stage 2', 'stage3': 'Tessera, stage 3',
          'none': 'no communication', 'ddp': 'PyTorch DDP',
          'fsdp1': 'PyTorch FSDP1', 'fsdp2': 'PyTorch FSDP2',
          'ds1': 'DeepSpeed 1', 'ds2': 'DeepSpeed 2', 'ds3': 'DeepSpeed 3',
          'stage3_of_4': 'Tessera, stage 3, 4 ranks',
          'stage0_ckpt': 'Tessera, stage 0, recomputed',
          'stage3_ckpt': 'Tessera, stage 3, recomputed',
          'stage3_selective': 'Tessera, stage 3, products kept',
          'ddp_ckpt': 'PyTorch DDP, checkpointed',
          'fsdp2_ckpt': 'PyTorch FSDP2, checkpointed',
          'stage3_nvme': 'Tessera, stage 3, states on nvme',
          'stage3_nvmep': 'Tessera, stage 3, parameters on nvme',
          'ds3_nvme': 'DeepSpeed 3, states on nvme',
          'ds3_nvmep': 'DeepSpeed 3, parameters on nvme',
          'write': 'plain writes and fsync', 'copy_fresh': 'copy, fresh memory',
          'copy_huge': 'copy, fresh huge pages', 'copy_warm': 'copy, used memory',
          'load_cold': 'load from the disk', 'read_cold': 'plain reads',
          'save_async': 'stall of an async save',
          'dcp_save_async': 'stall of DCP.async_save', 'dcp_save': 'DCP.save',
          'dcp_load': 'DCP.load', 'dcp_load_cold': 'DCP.load from the disk',
          'dcp_resume': 'DCP.load into a new optimizer',
          'reshard_2_to_3': '3 ranks read of 2',
          'reshard_4_to_3': '3 ranks read of 4'}


# What is behind a side's engine: ranks, activations that are computed again,
# states on a disk, parameters and states on a disk.
VARIANTS = ('_of_4', '_ckpt', '_selective', '_nvme', '_nvmep')


def engine_of(side):
    for variant in VARIANTS:
        side = side.removesuffix(variant)
    return side


def bytes_per_parameter(side):
    return BYTES_PER_PARAMETER.get(side) or BYTES_PER_PARAMETER[engine_of(side)]


@dataclasses.dataclass(frozen=True)
class Model:
    dim: int
    layers: int
    heads: int
    seq: int
    micro_batch: int

    @property
    def block_numel(self):
        return 12 * self.dim ** 2 + 13 * self.dim

    @property
    def numel(self):
        embeddings = (256 + self.seq) * self.dim
        return (embeddings + self.layers * self.block_numel + 2 * self.dim
                + 256 * self.dim)

    def options(self):
        return [word for field in dataclasses.fields(self)
                for word in (f'--{field.name}', str(getattr(self, field.name)))]

    def __str__(self):
        return (f'dim {self.dim}, {self.layers} layers, {self.heads} heads, '
                f'seq {self.seq}, micro-batch {self.micro_batch}: '
                f'{self.numel / 1e6:.1f} M parameters')


@dataclasses.dataclass(frozen=True)
class Goal:
    """The ratio of `ours` to `against`, of `what` they have of it. Without a
    limit it is information: how far ahead of a peer anybody can be depends on
    the machine, and is bounded by who does not communicate at all."""
    ours: str
    against: str
    what: str  # 'tokens/s', 'step time', 'speed', 'stall', 'memory' or 'bytes'
    at_least: float = None
    at_most: float = None


@dataclasses.dataclass(frozen=True)
class Row:
    name: str
    # 'speed', 'memory', 'offload' (both), 'optimizers', 'collectives' or
    # 'checkpoint'
    kind: str
    model: Model = None
    goals: tuple = ()
    steps: int = 3  # of a turn
    # The first ones of a turn, which do not count: where a step goes on behind
    # the next one, they have none before them.
    uncounted: int = 0
    loss_steps: int = 20  # that are compared, before anything is timed
    bf16: bool = False
    clip: float = 0
    note: str = ''

    @property
    def title(self):
        if self.model is None:
            return self.note
        words = [str(self.model), 'bf16' if self.bf16 else 'fp32']
        if self.clip:
            words.append(f'gradients clipped to {self.clip}')
        if self.note:
            words.append(self.note)
        return ', '.join(words)

    @property
    def sides(self):
        """The trainings, each once, in the order of the goals."""
        return list(dict.fromkeys(
            side for goal in self.goals for side in (goal.ours, goal.against)))


MIDDLE = Model(dim=512, layers=8, heads=8, seq=256, micro_batch=2)
LARGE = Model(dim=1024, layers=12, heads=8, seq=64, micro_batch=1)
NARROW = Model(dim=64, layers=24, heads=8, seq=16, micro_batch=1)
DEEP = Model(dim=256, layers=24, heads=8, seq=512, micro_batch=4)
SHORT = Model(dim=512, layers=8, heads=8, seq=64, micro_batch=1)
STORED = Model(dim=1024, layers=6, heads=8, seq=64, micro_batch=1)
SMALL = Model(dim=64, layers=2, heads=8, seq=32, micro_batch=2)  # for --small
# Of SMALL all states would stay in memory (offload_tuning.min_state_bytes).
SMALL_ON_DISK = Model(dim=256, layers=2, heads=8, seq=32, micro_batch=2)


def ahead_of(peer, ours='stage3', at_least=None):
    return Goal(ours, peer, 'tokens/s', at_least=at_least)


def of_the_bound(share):
    """Ours over any peer is so much, at least, of what no communication has
    over that peer: the peer's own speed is in both, and falls out."""
    return Goal('stage3', 'none', 'tokens/s', at_least=share)


def step_time(limit):
    return Goal('stage3', 'none', 'step time', at_most=limit)


def offloaded(side):
    """Against DeepSpeed's own."""
    ours, theirs = f'stage3_{side}', f'ds3_{side}'
    return (ahead_of(theirs, ours=ours, at_least=2.5),
            Goal(ours, theirs, 'memory', at_most=0.35))


# Operations of benchmarks/checkpoint, and of checkpoint_peer.py ("dcp_").
CHECKPOINT_GOALS = (
    Goal('save', 'write', 'speed', at_least=0.95),
    Goal('load', 'dcp_load', 'speed', at_least=1.5),
    Goal('load', 'dcp_resume', 'speed', at_least=1.5),
    Goal('save_async', 'copy_fresh', 'stall', at_most=1.1),
    Goal('reshard_2_to_3', 'wanted', 'bytes', at_most=1.05),
    Goal('reshard_4_to_3', 'wanted', 'bytes', at_most=1.05),
    # One copy of the state, and 8 MiB of a rank's buffers.
    Goal('save', 'state', 'memory', at_most=1.02),
    Goal('save_async', 'state', 'memory', at_most=1.02),
    Goal('save_async', 'copy_huge', 'stall'),
    Goal('save_async', 'copy_warm', 'stall'),
    Goal('save_async', 'dcp_save_async', 'stall'),
    Goal('save', 'dcp_save', 'speed'),
    Goal('load_cold', 'dcp_load_cold', 'speed'),
    Goal('load_cold', 'read_cold', 'speed'))

ROWS = (
    Row('A', 'speed', MIDDLE, (
        of_the_bound(0.98), step_time(0.97), ahead_of('fsdp2'), ahead_of('ds3'),
        ahead_of('ddp'), ahead_of('ddp', ours='stage0'))),
    Row('B', 'speed', MIDDLE, (
        of_the_bound(0.98), ahead_of('fsdp2'), ahead_of('ds3')), clip=1.0),
    # Without bfloat16 instructions a step takes 40 seconds.
    Row('C', 'speed', MIDDLE, (
        of_the_bound(0.98), ahead_of('fsdp2'), ahead_of('ds3')),
        bf16=True, steps=1),
    Row('D', 'speed', LARGE, (
        step_time(0.94), ahead_of('fsdp2'), ahead_of('ds3')),
        steps=2, loss_steps=10),
    Row('E', 'speed', NARROW, (step_time(1.3), ahead_of('fsdp2')), steps=20),
    Row('F', 'memory', LARGE,
        (Goal('stage3', 'fsdp2', 'memory', at_most=0.7),), steps=4,
        note='memory'),
    Row('G', 'speed', MIDDLE, (
        Goal('stage3_of_4', 'stage3', 'tokens/s', at_least=0.9),),
        loss_steps=3, note='4 ranks against 2 on the same CPUs'),
    Row('H', 'optimizers', note='steps of one tensor of 2^26 fp32 parameters, '
        '2 threads: bytes a second'),
    Row('I', 'collectives', note='collectives of 64 MiB fp32'),
    Row('J', 'speed', MIDDLE, (
        ahead_of('fsdp1', at_least=1.0),
        ahead_of('ds1', ours='stage1', at_least=1.0),
        ahead_of('ds2', ours='stage2', at_least=1.0)),
        note='the other peers'),
    Row('K', 'checkpoint', STORED, CHECKPOINT_GOALS,
        note='checkpoints of it with AdamW, 2 ranks'),
    Row('L', 'speed', MIDDLE, (
        Goal('stage3_ckpt', 'stage3', 'step time', at_most=1.33),
        Goal('stage3_selective', 'stage3', 'step time', at_most=1.08),
        ahead_of('ddp_ckpt', ours='stage3_ckpt', at_least=1.1),
        ahead_of('fsdp2_ckpt', ours='stage3_ckpt', at_least=1.4),
        ahead_of('ddp_ckpt', ours='stage0_ckpt'),
        ahead_of('ddp', ours='ddp_ckpt'), ahead_of('fsdp2', ours='fsdp2_ckpt')),
        note='activations computed again'),
    Row('M', 'memory', DEEP, (
        Goal('stage3_ckpt', 'fsdp2_ckpt', 'memory', at_most=1.0),
        Goal('stage3_ckpt', 'ddp_ckpt', 'memory', at_most=1.0),
        Goal('stage3_ckpt', 'stage3', 'memory')), steps=4,
        note='memory, activations computed again'),
    Row('N', 'offload', SHORT, offloaded('nvme'), uncounted=1,
        note='states on nvme'),
    Row('O', 'offload', LARGE, offloaded('nvme'), uncounted=1, loss_steps=6,
        note='states on nvme'),
    Row('P', 'offload', SHORT, offloaded('nvmep'), uncounted=1,
        note='parameters and states on nvme'),
    Row('Q', 'offload', LARGE, offloaded('nvmep'), uncounted=1, loss_steps=6,
        note='parameters and states on nvme'),
)
