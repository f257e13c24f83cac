"""The other side of transformers_test.cc: Hugging Face's own libraries.

usage: transformers_peer.py same A B C OUT
       transformers_peer.py logits TOKENS MODEL ...
       transformers_peer.py make TOKENS CONFIG MODEL

same    reads safetensors files or folders of them by the package safetensors,
        with numpy alone, and says which tensors of B or C have other bits than
        in A; writes them to the file OUT with all signs changed.
logits  loads each folder MODEL as transformers do, which must find all that it
        needs there and nothing else, and writes to MODEL.logits what it says to
        TOKENS.
make    makes a model of the folder CONFIG's config.json with random values,
        saves it to MODEL, in several files, and writes its logits, too.

Exits with 77 where a module is missing, and names it.
"""

import glob
import os
import sys


def read(path):
    from safetensors.numpy import load_file
    files = sorted(glob.glob(os.path.join(path, "*.safetensors"))) or [path]
    tensors = {}
    for file in files:
        for name, value in load_file(file).items():
            assert name not in tensors, "%s: %s is there twice" % (path, name)
            tensors[name] = value
    return tensors


def same(first, second, third, out):
    from safetensors.numpy import save_file
    expected = read(first)
    for path in (second, third):
        got = read(path)
        faults = sorted(set(expected) ^ set(got))
        for name in set(expected) & set(got):
            x, y = expected[name], got[name]
            if x.dtype != y.dtype or x.shape != y.shape or (x.tobytes() !=
                                                            y.tobytes()):
                faults.append(name)
        if faults:
            sys.exit("%s: other %s than %s" % (path, ", ".join(faults), first))
    save_file({name: -value for name, value in expected.items()}, out)


def write_logits(model, tokens, out):
    import torch
    from safetensors.torch import load_file, save_file
    with torch.no_grad():
        values = model(load_file(tokens)["tokens"]).logits
    assert values.dtype == torch.float32, values.dtype
    save_file({"logits": values.contiguous()}, out)


def logits(tokens, *folders):
    import torch  # first: transformers without it raise something else
    from transformers import AutoModelForCausalLM
    for folder in folders:
        model, info = AutoModelForCausalLM.from_pretrained(
            folder, output_loading_info=True)
        faults = {what: names for what, names in info.items() if names}
        if faults:
            sys.exit("%s: %s" % (folder, faults))
        write_logits(model, tokens, folder + ".logits")


def make(tokens, config, folder):
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.from_pretrained(config)).eval()
    with torch.no_grad():
        for values in model.parameters():  # biases and norms, too
            values += torch.randn_like(values) * values.shape[-1]**-0.5
    model.save_pretrained(folder, max_shard_size="20KB")
    files = glob.glob(os.path.join(folder, "*.safetensors"))
    assert len(files) > 1, "expected several files, got %s" % files
    write_logits(model, tokens, folder + ".logits")


if __name__ == "__main__":
    try:
        {"same": same, "logits": logits, "make": make}[sys.argv[1]](
            *sys.argv[2:])
    except ModuleNotFoundError as error:
        print("%s has no %s" % (sys.executable, error.name))
        sys.exit(77)
