"""if_cuda: what to take in a build with CUDA, and without."""

load("@local_cuda//:defs.bzl", _HAS_CUDA = "HAS_CUDA", _HAS_NCCL = "HAS_NCCL")

HAS_CUDA = _HAS_CUDA
HAS_NCCL = _HAS_NCCL

def if_cuda(yes, no = []):
    """Returns `yes` in a build with CUDA and `no` in a build for CPU only."""
    return yes if HAS_CUDA else no

def if_nccl(yes, no = []):
    """Returns `yes` where nccl.h was found, which implies CUDA."""
    return yes if HAS_NCCL else no
