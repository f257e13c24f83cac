"""Trains the GPT of benchmarks/gpt/peer_gpt.h by another engine: one rank of it.

RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT say which. It takes turns as
benchmarks/train does: each rank prints a line when its libraries are loaded, then
reads lines, one to begin and the number of steps of each turn, and prints
{"ms": [...], "loss": [...]} after each.
"""
import argparse
import json
import os
import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

WARM_UP = 2  # steps that are neither timed nor in the peaks
LR = 1e-3
WEIGHT_DECAY = 0.01
VOCABULARY = 256


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.n1 = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.o = nn.Linear(dim, dim)
        self.n2 = nn.LayerNorm(dim)
        self.f1 = nn.Linear(dim, 4 * dim)
        self.f2 = nn.Linear(4 * dim, dim)

    def forward(self, x):
        batch, length, dim = x.shape
        heads = self.qkv(self.n1(x)).view(
            batch, length, 3, self.heads, dim // self.heads)
        q, k, v = heads.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(mixed.transpose(1, 2).reshape(batch, length, dim))
        return x + self.f2(F.gelu(self.f1(self.n2(x))))


class HeadsApart(nn.Module):
    """A Block without a fused product."""

    def __init__(self, block):
        super().__init__()
        self.n1, self.o, self.n2 = block.n1, block.o, block.n2
        self.f1, self.f2 = block.f1, block.f2
        dim = block.o.in_features
        self.head_dim = dim // block.heads
        for name, weight, bias in zip(
                'qkv', block.qkv.weight.chunk(3), block.qkv.bias.chunk(3)):
            layer = nn.Linear(dim, dim)
            with torch.no_grad():
                layer.weight.copy_(weight)
                layer.bias.copy_(bias)
            setattr(self, name, layer)

    def forward(self, x):
        y = self.n1(x)
        q, k, v = (layer(y).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
                   for layer in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(mixed.transpose(1, 2).flatten(2))
        return x + self.f2(F.gelu(self.f1(self.n2(x))))


class Gpt(nn.Module):
    checkpointed = False

    def __init__(self, dim, layers, heads, length):
        super().__init__()
        self.te = nn.Embedding(VOCABULARY, dim)
        self.pe = nn.Embedding(length, dim)
        self.b = nn.ModuleList([Block(dim, heads) for _ in range(layers)])
        self.n = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, VOCABULARY, bias=False)

    def forward(self, inputs, targets):
        h = self.te(inputs) + self.pe.weight[:inputs.shape[1]]
        for block in self.b:
            h = (checkpoint(block, h, use_reentrant=False)
                 if self.checkpointed else block(h))
        logits = self.head(self.n(h)).flatten(0, 1).float()
        return F.cross_entropy(logits, targets.flatten())


def adamw(parameters):
    return torch.optim.AdamW(
        parameters, lr=LR, weight_decay=WEIGHT_DECAY, fused=True)


class Torch:
    """no communication ("single"), DDP, FSDP1, FSDP2, tensor parallelism."""

    def __init__(self, model, options):
        self.options = options
        self.model = getattr(self, options.engine)(model)
        # A fused step takes parameters that are all DTensor, or none.
        kinds = {}
        for parameter in self.model.parameters():
            kinds.setdefault(type(parameter.data), []).append(parameter)
        self.optimizer = adamw([{'params': kind} for kind in kinds.values()])
        # FSDP2 has a policy of its own; users of the others take autocast.
        self.autocast = options.bf16 and options.engine != 'fsdp2'

    def single(self, model):
        return model

    def ddp(self, model):
        from torch.nn.parallel import DistributedDataParallel
        return DistributedDataParallel(model, gradient_as_bucket_view=True)

    def fsdp1(self, model):
        from torch.distributed.fsdp import FullyShardedDataParallel
        return FullyShardedDataParallel(
            model, device_id=torch.device(self.options.device),
            auto_wrap_policy=lambda module, recurse, nonwrapped_numel:
            recurse or isinstance(module, Block))

    def fsdp2(self, model):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import (
            CPUOffloadPolicy, fully_shard, MixedPrecisionPolicy)
        options = {'mesh': init_device_mesh(
            self.options.device, (dist.get_world_size(),))}
        if self.options.bf16:
            options['mp_policy'] = MixedPrecisionPolicy(
                param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        if self.options.cpu_offload:
            options['offload_policy'] = CPUOffloadPolicy(
                pin_memory=self.options.device == 'cuda')
        for block in model.b:
            fully_shard(block, **options)
        return fully_shard(model, **options)

    def tp(self, model):
        """parallelize_module. Queries, keys and values have to be products of
        their own, and views must not name the number of heads."""
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Replicate
        from torch.distributed.tensor.parallel import (
            ColwiseParallel, RowwiseParallel, parallelize_module)
        mesh = init_device_mesh(self.options.device, (dist.get_world_size(),))
        of_block = {name: ColwiseParallel() for name in ('q', 'k', 'v', 'f1')}
        of_block.update({name: RowwiseParallel() for name in ('o', 'f2')})
        for index, block in enumerate(model.b):
            model.b[index] = HeadsApart(block)
            parallelize_module(model.b[index], mesh, of_block)
        return parallelize_module(model, mesh, {
            'head': ColwiseParallel(output_layouts=Replicate())})

    def step(self, inputs, targets):
        with torch.autocast(self.options.device, dtype=torch.bfloat16,
                            enabled=self.autocast):
            loss = self.model(inputs, targets)
        loss.backward()
        if self.options.clip:
            torch.nn.utils.clip_grad_norm_(
                self.model.parameters(), self.options.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss


def on_disk(folder):
    return {'device': 'nvme', 'nvme_path': folder, 'pin_memory': False}


def set_offload(config, options):
    """States, and parameters, on the disk, by the engine's own AdamW: it takes
    no other there."""
    zero = config['zero_optimization']
    zero['offload_optimizer'] = {
        **on_disk(options.states_on_disk or options.parameters_on_disk),
        'pipeline_read': True, 'pipeline_write': True}
    if options.parameters_on_disk:
        # With its defaults none would be on the disk, since 1e9 elements stay in
        # memory, or else its buffers would run out: it keeps what it has read
        # from forward to backward, unless this is switched off, and reads ahead.
        largest = max(4 * options.dim, VOCABULARY, options.seq) * options.dim
        zero['offload_param'] = {
            **on_disk(options.parameters_on_disk), 'max_in_cpu': 0,
            'buffer_size': largest, 'buffer_count': 16}
        zero['stage3_max_live_parameters'] = 2 * largest
        zero['stage3_max_reuse_distance'] = 0
        zero['stage3_prefetch_bucket_size'] = largest
    config['aio'] = {'block_size': 1 << 20, 'queue_depth': 8,
                     'intra_op_parallelism': 1, 'single_submit': False,
                     'overlap_events': True}
    config['optimizer'] = {
        'type': 'AdamW', 'params': {'lr': LR, 'weight_decay': WEIGHT_DECAY}}


class DeepSpeed:
    """ds1, ds2, ds3: ZeRO stages, with torch's fused AdamW, or its own where
    states are on a disk."""

    def __init__(self, model, options):
        import deepspeed
        config = {
            'train_micro_batch_size_per_gpu': options.micro_batch,
            'zero_optimization': {
                'stage': int(options.engine[2:]),
                'overlap_comm': True,
                'contiguous_gradients': True,
            },
            'bf16': {'enabled': options.bf16},
            'zero_allow_untested_optimizer': True,
            'gradient_clipping': options.clip,
        }
        if options.states_on_disk or options.parameters_on_disk:
            set_offload(config, options)
            of_states = {'model_parameters': model.parameters()}
            if options.parameters_on_disk:
                # initialize() alone would have bfloat16 buffers for them.
                deepspeed.zero.Init(module=model, config_dict_or_path=config)
        else:
            of_states = {'optimizer': adamw(model.parameters())}
        self.engine = deepspeed.initialize(
            model=model, config=config, **of_states)[0]

    def step(self, inputs, targets):
        loss = self.engine(inputs, targets)
        self.engine.backward(loss)
        self.engine.step()
        return loss


class Batches:
    def __init__(self, options, rank):
        with open(options.data, 'rb') as file:
            self.text = torch.frombuffer(
                bytearray(file.read()), dtype=torch.uint8)
        self.options, self.rank = options, rank

    def of(self, step):
        generator = torch.Generator().manual_seed(1000 * step + self.rank)
        length = self.options.seq
        starts = torch.randint(0, len(self.text) - length - 1,
                               (self.options.micro_batch,),
                               generator=generator)
        rows = torch.stack([self.text[start:start + length + 1].long()
                            for start in starts.tolist()])
        device = self.options.device
        return rows[:, :-1].to(device), rows[:, 1:].to(device)


def parse():
    parser = argparse.ArgumentParser()
    parser.add_argument('--engine', required=True)
    parser.add_argument('--data', required=True)
    parser.add_argument('--device', default='cpu',
                        help='cpu, or cuda: of as many GPUs that of its rank; '
                        'not of DeepSpeed')
    parser.add_argument('--device_init', action='store_true',
                        help='parameters are made on the device')
    parser.add_argument('--cpu_offload', action='store_true',
                        help="FSDP2's CPUOffloadPolicy, with OMP_NUM_THREADS "
                        'threads for the step')
    parser.add_argument('--dim', type=int, default=512)
    parser.add_argument('--layers', type=int, default=8)
    parser.add_argument('--heads', type=int, default=8)
    parser.add_argument('--seq', type=int, default=256)
    parser.add_argument('--micro_batch', type=int, default=2)
    parser.add_argument('--bf16', action='store_true')
    parser.add_argument('--clip', type=float, default=0)
    parser.add_argument('--ckpt', action='store_true',
                        help='blocks are computed again in backward')
    parser.add_argument('--states_on_disk', metavar='FOLDER',
                        help='where DeepSpeed 3 has the optimizer states')
    parser.add_argument('--parameters_on_disk', metavar='FOLDER',
                        help='where it has parameters, and states')
    parser.add_argument('--save_init', default='',
                        help='write the initial weights there, and end')
    parser.add_argument('--save_nudged', default=[], nargs='*', metavar='FILE',
                        help='with --save_init: the same, each weight moved by '
                        'one unit in its last place (of bfloat16 with --bf16), '
                        'at random')
    return parser.parse_args()


def nudged(weights, dtype):
    """Each weight one step of `dtype` up or down, at random."""
    of_dtype = weights.to(dtype)
    up = torch.rand(weights.shape) < 0.5
    ends = torch.where(up, torch.inf, -torch.inf).to(dtype)
    return weights + (torch.nextafter(of_dtype, ends) - of_dtype).float()


def save_weights(options):
    from safetensors.torch import save_file
    model = Gpt(options.dim, options.layers, options.heads, options.seq)
    weights = dict(model.state_dict())
    save_file(weights, options.save_init)
    dtype = torch.bfloat16 if options.bf16 else torch.float32
    for file in options.save_nudged:
        save_file({name: nudged(weight, dtype)
                   for name, weight in weights.items()}, file)


def load_libraries(options):
    """What any training by this engine holds, before its model."""
    if options.engine.startswith('ds'):
        import deepspeed  # noqa: F401
    if options.engine.startswith('fsdp'):
        import torch.distributed.fsdp  # noqa: F401
    if not options.save_init:
        cuda = options.device == 'cuda'
        backend = 'cpu:gloo,cuda:nccl' if options.cpu_offload else 'nccl'
        dist.init_process_group(backend if cuda else 'gloo')
        if cuda:
            torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())


def main():
    options = parse()
    # DeepSpeed writes to standard output, from C++ too: only our lines go there.
    out = os.fdopen(os.dup(1), 'w')
    os.dup2(2, 1)
    if not options.cpu_offload:
        torch.set_num_threads(1)
    torch.manual_seed(0)
    load_libraries(options)
    if options.save_init:
        save_weights(options)
        return
    rank = dist.get_rank()

    def say(**line):
        print(json.dumps(line), file=out, flush=True)

    say(ms=[], loss=[])
    sys.stdin.readline()
    torch.manual_seed(0)
    made_on = 'cpu' if options.cpu_offload else options.device
    with torch.device(made_on if options.device_init else 'cpu'):
        model = Gpt(options.dim, options.layers, options.heads, options.seq)
    model.checkpointed = options.ckpt
    model.to(made_on)
    kind = DeepSpeed if options.engine.startswith('ds') else Torch
    trainer = kind(model, options)
    batches = Batches(options, 0 if options.engine == 'tp' else rank)
    done = 0
    for line in sys.stdin:
        milliseconds, losses = [], []
        for _ in range(int(line)):
            if done == WARM_UP and options.device == 'cuda':
                torch.cuda.reset_peak_memory_stats()
            inputs, targets = batches.of(done)
            start = time.perf_counter()
            loss = trainer.step(inputs, targets).item()
            if done >= WARM_UP:
                milliseconds.append(1e3 * (time.perf_counter() - start))
            losses.append(loss)
            done += 1
        say(ms=milliseconds, loss=losses)
    if options.device == 'cuda':
        say(device={'allocated_peak': torch.cuda.max_memory_allocated(),
                    'reserved': torch.cuda.memory_reserved()})
    dist.destroy_process_group()


if __name__ == '__main__':
    main()
