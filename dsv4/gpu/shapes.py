"""Decode step: into how many parts the step's kernels cut their work, what those in Triton take at most, and
how they call a way to round activations. Arithmetic only, without Triton."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dsv4.quant.formats import Format

if TYPE_CHECKING:
    import torch

# Weights lie in bricks of 16 rows and 512 columns. Bytes of one, and of the scales beside it; matvec.cu knows
# the same numbers.
ROWS, SLICE = 16, 512
BRICK = {Format.NVFP4: 4096, Format.MXFP4: 4096, Format.FP8: 8192, Format.BF16: 16384}
SCALES = {Format.NVFP4: 512, Format.MXFP4: 256, Format.FP8: 16, Format.BF16: 0}
ALIGNED = 256  # bytes, of each part of an expert
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


def chunk_keys(act: "torch.dtype") -> int:
    """Keys of a chunk of attention. float32, with twice the bytes and no tensor cores, serves tests alone."""
    return 64 if act.itemsize == 2 else 16


def attend_chunks(act: "torch.dtype", window: int, max_entries: int) -> int:
    """Chunks of a row that may see `max_entries` compressed entries (0: none)."""
    return -(-window // chunk_keys(act)) + -(-max_entries // chunk_keys(act))


def tile_bytes(format: Format, shape: tuple[int, int]) -> int:
    """Of one weight in bricks, with its factor."""
    return -(-shape[0] // ROWS) * -(-shape[1] // SLICE) * (BRICK[format] + SCALES[format]) + 4


@dataclass(frozen=True)
class Form:
    """An expert in one piece: tiles and scales of gate and up, then of down."""

    format: Format
    width: int
    hidden: int

    def parts(self) -> list[tuple[int, tuple[int, ...]]]:
        """Where each part begins, and its shape: units, slices, halves, bytes of a brick."""
        out, at = [], 0
        for n, k, halves in ((self.width, self.hidden, 2), (self.hidden, self.width, 1)):
            lead = (-(-n // ROWS), -(-k // SLICE), halves)
            for size in (BRICK[self.format], SCALES[self.format]):
                out.append((at, (*lead, size)))
                at += -(-lead[0] * lead[1] * halves * size // ALIGNED) * ALIGNED
        return [*out, (at, ())]

    @property
    def num_bytes(self) -> int:
        return self.parts()[-1][0]
