"""Makes the files beside it, for tools/torch_to_safetensors_test.py.

    torchrun --nproc-per-node=2 tools/testdata/make_samples.py NEW_FOLDER

with torch 2.11 and deepspeed 0.19.8 (benchmarks/peers_lib/requirements.txt). The
number k of a tensor whose name has n letters is (7 k + n) % 113, or that % 2.
"""

import os
import shutil
import subprocess
import sys

import torch
from torch import distributed, nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor


def numbers(name, sizes, dtype=torch.float32):
    k = torch.arange(torch.Size(sizes).numel())
    k = (7 * k + len(name)) % 113
    return (k % 2 if dtype == torch.bool else k).to(dtype).reshape(sizes)


def torch_save():
    values = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)).state_dict()
    for name, value in values.items():
        value.copy_(numbers(name, value.shape))
    for dtype in ("bfloat16", "float16", "float64", "int32", "int16", "int8", "uint8",
                  "uint16", "bool"):
        values[dtype] = numbers(dtype, (2, 3), getattr(torch, dtype))
    values["tied.key"] = values["0.weight"]
    values["rows"] = torch.cat([torch.ones(1, 4), numbers("rows", (2, 4))])[1:]
    values["columns"] = torch.ones(3, 5, dtype=torch.bfloat16)
    values["columns"][:, 1:3] = numbers("columns", (3, 2))
    values["columns"] = values["columns"][:, 1:3]
    values["transposed"] = numbers("transposed", (3, 4)).t().contiguous().t()
    values["permuted"] = numbers("permuted", (2, 3, 4), torch.float16).permute(
        2, 0, 1).contiguous().permute(1, 2, 0)
    values["parameter"] = nn.Parameter(numbers("parameter", (3,)))
    values["marked"] = numbers("marked", (3,))
    values["marked"].note = "an attribute"
    values["empty"] = torch.empty(0, 3)
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([weight])
    weight.sum().backward()
    optimizer.step()
    torch.save({"model": values, "optimizer": optimizer.state_dict(), "epoch": 3},
               "state.pt")


def dcp(mesh):
    model = nn.Linear(3, 5, bias=False)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    values, states = get_state_dict(model, optimizer)
    for name, value in (("weight", values["weight"]),
                        ("exp_avg", states["state"]["weight"]["exp_avg"])):
        value.copy_(distribute_tensor(numbers(name, (5, 3)), mesh, [Shard(0)]))
    del states["state"]["weight"]["exp_avg_sq"]
    states["param_groups"] = [{"lr": 1e-3}]
    values["columns"] = distribute_tensor(
        numbers("columns", (3, 5), torch.bfloat16), mesh, [Shard(1)])
    values["transposed"] = numbers("transposed", (3, 4)).t().contiguous().t()
    values["short"] = distribute_tensor(numbers("short", (1,)), mesh, [Shard(0)])
    checkpoint.save({"model": values, "optim": states, "epoch": 3}, checkpoint_id="dcp")


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(3, 5, bias=False)
        self.b = nn.Linear(3, 5, bias=False)
        self.a.weight = self.b.weight = nn.Parameter(numbers("a.weight", (5, 3)))
        self.register_buffer("count", numbers("count", (), torch.int64))

    def forward(self, x):
        return self.a(x) + self.b(x)


def universal(stage):
    import deepspeed  # pylint: disable=import-outside-toplevel
    from deepspeed import utils  # pylint: disable=import-outside-toplevel
    model = Tied()
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config={
            "train_batch_size": 2, "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {"torch_adam": True, "lr": 0.0}},
            "zero_optimization": {"stage": stage}})
    engine.backward(engine(torch.ones(1, 3, dtype=torch.bfloat16)).sum())
    engine.step()
    if stage == 1:  # of stage 3 it cannot, where a rank has less than another
        utils.safe_set_full_optimizer_state(
            model.a.weight, numbers("exp_avg", (5, 3)), "exp_avg")
    engine.save_checkpoint("deepspeed", tag=f"stage{stage}")
    distributed.barrier()
    if distributed.get_rank() == 0:
        subprocess.run(
            [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal",
             "--inject_missing_state", "--num_extract_workers=1",
             "--num_merge_workers=1", "--input_folder", f"deepspeed/stage{stage}",
             "--output_folder", f"universal{stage}"], check=True)
    distributed.barrier()


def main():
    os.makedirs(sys.argv[1], exist_ok=True)
    os.chdir(sys.argv[1])
    distributed.init_process_group("gloo")
    torch.manual_seed(1)
    if distributed.get_rank() == 0:
        torch_save()
    dcp(init_device_mesh("cpu", (2,)))
    universal(1)
    universal(3)
    if distributed.get_rank() == 0:
        shutil.rmtree("deepspeed")
        os.remove("latest_universal")
        os.remove("universal3/zero_pp_rank_1_mp_rank_00_model_states.pt")
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
