#!/bin/bash
# Starts a program's ranks by PyTorch's torchrun, on each host once:
#
#   examples/launch/torchrun.sh PROGRAM ARGUMENTS...
#   HOSTS=2 HOST_RANK=1 HEAD=node1 examples/launch/torchrun.sh PROGRAM ...
#
# RANKS: on each host, default one for each GPU, or 1. torchrun watches its ranks
# and, with --max_restarts, starts all of them again if one ends; a program that
# resumes its checkpoint then goes on.
set -euo pipefail

gpus="$(nvidia-smi --list-gpus 2> /dev/null | wc -l || true)"
# --no-python: the program is none of Python's. A static rendezvous: HOSTS hosts
# are waited for, no fewer.
exec torchrun --no-python --nnodes="${HOSTS:-1}" \
  --node_rank="${HOST_RANK:-0}" --nproc_per_node="${RANKS:-$((gpus ? gpus : 1))}" \
  --master_addr="${HEAD:-127.0.0.1}" --master_port="${PORT:-29500}" \
  --max_restarts="${RESTARTS:-0}" "$@"
