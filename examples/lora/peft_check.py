"""What peft makes of a base and adapters is what the merged model says.

usage: peft_check.py BASE ADAPTERS MERGED

Both sides compute in float32. With W the weights, x (W + s B A) and
x W + s (x A) B differ by roundings: n products are summed on the way from a
token to a logit, in each of the layers over the width seven times, over the
mlp's width twice and over the text twice. Rounding errors u = eps / 2 of a sum
of n are at most 4 sqrt(n) u, all but certainly (Higham and Mary, 2019), on
either side, in parts of the largest logit.
"""

import sys

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM


def main(base, adapters, merged):
    length = 13
    tokens = (torch.arange(2 * length)**3 % 251).view(2, length)
    with torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(base)
        plain = model(tokens).logits.clone()
        ours = AutoModelForCausalLM.from_pretrained(merged)(tokens).logits
        theirs = PeftModel.from_pretrained(model, adapters)(tokens).logits
    config = model.config
    n = config.num_hidden_layers * (7 * config.hidden_size + 2 *
                                    config.intermediate_size + 2 * length)
    eps = torch.finfo(torch.float32).eps
    bound = 4 * n**0.5 * eps * ours.abs().max().item()
    far = (ours - theirs).abs().max().item()
    print("peft: %.3g from the merged model, of %.3g; largest logit %.3g" %
          (far, bound, ours.abs().max().item()))
    if not far <= bound:
        sys.exit("peft says something else than the merged model")
    if not (plain - theirs).abs().max().item() > 1000 * bound:
        sys.exit("the adapters change nothing")


if __name__ == "__main__":
    main(*sys.argv[1:])
