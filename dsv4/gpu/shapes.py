"""Decode step: into how many parts the step's kernels cut their work, what those in Triton take at most, and
how they call a way to round activations. Arithmetic only, without Triton."""

import torch

MIX_CHUNK = 32  # channels of each stream per block of mhc/decode_open.cu
MIX_WIDTH = 32  # columns of `partial`: the mixes that weight the streams, the sum of squares, the other mixes
# Of a head: a chunk of wider keys does not fit in shared memory (attention/decode_any.py). Bytes before
# float32 ones.
MAX_HEAD_DIM, NOPE_ALIGNED = 512, 4
# What queries and keys of a program fit in registers (index/decode.py).
MAX_INDEX_HEADS, MIN_INDEX_DIM, MAX_INDEX_DIM = 64, 32, 128
# Tokens that an entry is made of: prompts pool them in one program (attention/prefill.py).
MAX_POOLED = 4096
# What a kernel makes of a row of activations; `a16` leaves it as it is (round.cuh).
HOW = {"a16": 0, "a8": 8, "a4": 4}


def mix_chunks(hidden_size: int) -> int:
    return -(-hidden_size // MIX_CHUNK)


def chunk_keys(act: torch.dtype) -> int:
    """Keys of a chunk of attention. float32, with twice the bytes and no tensor cores, serves tests alone."""
    return 64 if act is torch.bfloat16 else 16


def attend_chunks(act: torch.dtype, window: int, max_entries: int) -> int:
    """Chunks of a row that may see `max_entries` compressed entries (0: none)."""
    return -(-window // chunk_keys(act)) + -(-max_entries // chunk_keys(act))
