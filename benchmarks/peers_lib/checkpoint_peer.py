"""Checkpoints by PyTorch's DCP of what benchmarks/checkpoint saves and loads: the
same GPT with AdamW's states, sharded by FSDP2. One rank of it.

It takes turns as benchmarks/checkpoint --turns does, with these operations:

  save        dcp.save into a folder that was removed
  save_async  the stall of dcp.async_save: until it returns
  load        dcp.load into the tensors that are there, from the system's caches
  load_cold   the same from the disk
  resume      what a program does that begins anew, as PyTorch's tutorial of DCP
              says: a model that is there, an optimizer that has no states yet;
              from the system's caches
"""
import argparse
import json
import os
import shutil
import sys
import time

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.fsdp  # noqa: F401
from torch.distributed.checkpoint.state_dict import (get_state_dict,
                                                     set_state_dict)
from torch.distributed.checkpoint.stateful import Stateful

import train_peer


class App(Stateful):
    """A model and its optimizer, as DCP saves and loads them."""

    def __init__(self, model, optimizer):
        self.model, self.optimizer = model, optimizer

    def state_dict(self):
        weights, states = get_state_dict(self.model, self.optimizer)
        return {'model': weights, 'optim': states}

    def load_state_dict(self, state_dict):
        set_state_dict(self.model, self.optimizer,
                       model_state_dict=state_dict['model'],
                       optim_state_dict=state_dict['optim'])


class Bench:
    def __init__(self, options):
        self.folder = os.path.join(options.dir, 'dcp')
        # save_async's notes are of threads beside those of the training.
        self.beside = dist.new_group(backend='gloo')
        torch.manual_seed(0)
        model = train_peer.Gpt(options.dim, options.layers, 8, 64)
        trainer = train_peer.Torch(model, argparse.Namespace(
            engine='fsdp2', bf16=False, clip=0))
        tokens = torch.randint(train_peer.VOCABULARY, (1, 64))
        trainer.step(tokens, tokens)
        self.state = {'app': App(trainer.model, trainer.optimizer).state_dict()}
        self.trainer = trainer
        self.numel = sum(p.numel() for p in model.parameters())

    def run(self, operation):
        if operation.startswith('save'):
            self.together(lambda: shutil.rmtree(self.folder,
                                                ignore_errors=True))
        if operation in ('load', 'load_cold', 'resume'):
            os.sync()
            self.together(lambda: self.set_cached(operation != 'load_cold'))
        app = App(self.trainer.model,
                  train_peer.adamw(self.trainer.model.parameters()))
        os.sync()
        dist.barrier()
        begin = time.perf_counter()
        pending = None
        if operation == 'save':
            dcp.save(self.state, checkpoint_id=self.folder)
        elif operation == 'save_async':
            pending = dcp.async_save(self.state, checkpoint_id=self.folder,
                                     process_group=self.beside)
        elif operation in ('load', 'load_cold'):
            dcp.load(self.state, checkpoint_id=self.folder)
        elif operation == 'resume':
            dcp.load({'app': app}, checkpoint_id=self.folder)
        else:
            raise ValueError(f'no operation {operation!r}')
        dist.barrier()
        milliseconds = 1e3 * (time.perf_counter() - begin)
        if pending is not None:
            pending.result()
            dist.barrier()
        return milliseconds

    def together(self, work):
        if dist.get_rank() == 0:
            work()
        dist.barrier()

    def set_cached(self, cached):
        for entry in os.scandir(self.folder):
            with open(entry.path, 'rb', buffering=0) as file:
                if not cached:
                    os.posix_fadvise(file.fileno(), 0, 0,
                                     os.POSIX_FADV_DONTNEED)
                while cached and file.read(1 << 20):
                    pass

    def bytes(self):
        return sum(entry.stat().st_size for entry in os.scandir(self.folder))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument('--dir', required=True)
    parser.add_argument('--dim', type=int, default=1024)
    parser.add_argument('--layers', type=int, default=6)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group('gloo')
    out, sys.stdout = sys.stdout, sys.stderr

    def say(**line):
        print(json.dumps(line), file=out, flush=True)

    say(ms=0)
    sys.stdin.readline()
    bench = Bench(options)
    for line in sys.stdin:
        milliseconds = bench.run(line.strip())
        say(ms=milliseconds, bytes=bench.bytes(), peak_bytes=0,
            state_bytes=12 * bench.numel)
    dist.destroy_process_group()


main()
