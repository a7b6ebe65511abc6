"""Every kernel of the step compiles without a GPU, and fits on each that it is built for: bfloat16 at
published sizes, float32 tiny."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from step_support import IS_INTERPRETED
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed")

from dsv4.config import ModelConfig, preset
from dsv4.gpu.architectures import ARCHITECTURES
from dsv4.ops.attention import decode_any, prepare
from dsv4.ops.draft import decode as draft
from dsv4.ops.index import decode as index
from dsv4.ops.linear.decode import splits
from dsv4.ops.rows import quantize
from dsv4.quant.formats import Format, QuantTensor, empty_rows
from tests.aot import check_fits, compiling

pytestmark = pytest.mark.skipif(IS_INTERPRETED, reason="an interpreted function is not compiled")
T, SLOTS, ROWS = 1, 2, 256


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def numbers(count: int = T) -> Tensor:
    return empty(count, dtype=torch.int64)


def rows_of(format: Format, c: ModelConfig, act: torch.dtype) -> QuantTensor:
    d, rope = (c.head_dim, c.rope_dim) if format is Format.KV8 else (c.index_dim, 0)
    return empty_rows(format, ROWS, d, rope, act, "meta")


def pooling(d: int, ratio: int, m: int, out: QuantTensor) -> prepare.Pooling:
    fresh, tail = empty(T, m * d), empty(SLOTS, ratio * m + 8, m * d)
    return prepare.Pooling(fresh, fresh, empty(ratio, m * d), tail, tail, empty(d), out)


def launch_prepare(c: ModelConfig, act: torch.dtype) -> None:
    cos = empty(1024, c.rope_dim // 2)
    q_low, kv = empty(T, c.q_rank, dtype=act), empty(T, c.head_dim, dtype=act)
    ring, table = rows_of(Format.KV8, c, act), empty(SLOTS, 4, dtype=torch.int32)
    for ratio, m in ((0, 0), (4, 2), (128, 1)):
        entries = pooling(c.head_dim, ratio, m, rows_of(Format.KV8, c, act)) if m else None
        keys = pooling(c.index_dim, ratio, m, rows_of(Format.MXFP4, c, act)) if m == 2 else None
        prepare.prepare(
            *(q_low, empty(c.q_rank), q_low, kv, empty(c.head_dim), ring, c.window + 8, cos, cos),
            *(numbers(), numbers(), c.norm_eps, table, 256 // max(ratio, 1), ratio, entries, keys),
            *((None, "a16") if ratio else (q_low, "a4")),
        )
    q = empty(T, c.num_heads, c.head_dim, dtype=act)
    iq = empty(T, c.index_heads, c.index_dim, dtype=act)
    for some_q, some_iq in ((q, None), (q, iq), (None, iq)):
        prepare.queries(some_q, some_iq, cos, cos, numbers(), c.norm_eps)


def launch_index(c: ModelConfig, act: torch.dtype) -> None:
    iq, weights = empty(T, c.index_heads, c.index_dim, dtype=act), empty(T, c.index_heads, dtype=act)
    for entries in (4096, 65536):  # programs of few keys, and of many
        index.scores(
            *(iq, weights, rows_of(Format.MXFP4, c, act), empty(SLOTS, 64, dtype=torch.int32)),
            *(numbers(), numbers(), empty(T, entries), 4, 64, 0.1),
        )


def launch_attend(c: ModelConfig, act: torch.dtype) -> None:
    chunks = decode_any.num_chunks(act, c.window, c.index_topk)
    q = empty(T, c.num_heads, c.head_dim, dtype=act)
    part_o, part_ml = empty(T, chunks, *q.shape[1:]), empty(T, chunks, c.num_heads, 2)
    ring, entries = rows_of(Format.KV8, c, act), rows_of(Format.KV8, c, act)
    listed, table = empty(T, c.index_topk, dtype=torch.int32), empty(SLOTS, 64, dtype=torch.int32)
    for pool, rows, ratio in ((None, None, 0), (entries, listed, 4), (entries, None, 128)):
        decode_any.attend(
            *(q, ring, c.window + 8, c.window, pool, rows, table, 256 // max(ratio, 1), ratio),
            *(numbers(), numbers(), part_o, part_ml),
        )
    cos, out = empty(1024, c.rope_dim // 2), empty(T, c.num_heads * c.head_dim, dtype=act)
    decode_any.combine(part_o, part_ml, empty(c.num_heads), cos, cos, numbers(), out)


def launch_quantize(c: ModelConfig, act: torch.dtype) -> None:
    # Four channels more: rows of BF16 that 16 bytes divide are quantize.cu's.
    hidden, inner = c.hidden_size + 4, c.expert_width + 4
    x, u = empty(T, hidden, dtype=act), empty(T, c.o_groups * c.o_rank + 4, dtype=act)
    for activations in ("a8", "a4"):
        quantize.round_values(u, u, activations)
    widest = empty(T, quantize.MAX_CHANNELS, dtype=act)
    quantize.round_values(widest, widest, "a4")
    quantize.round_values(x, x, "a4", empty(hidden), c.norm_eps, x)
    quantize.swiglu_values(empty(T, 2 * inner, dtype=act), empty(T), c.swiglu_limit, "a4")
    quantize.pack(x, is_tiled=True)
    quantize.swiglu_pack(empty(T, 2 * inner, dtype=act), empty(T), c.swiglu_limit)


def launch_draft(c: ModelConfig, act: torch.dtype) -> None:
    count, block, stages, targets, rank = 2, 5, 3, 3, 256 if c.hidden_size < 7168 else 512
    rows, d, many = count * (block + 1), c.hidden_size, count * block
    anchors, settings = numbers(count), empty(count, 8, dtype=torch.int64)
    out, chain = empty(rows, d, dtype=act), empty(block + 1, count, dtype=torch.int64)
    draft.begin(
        *(anchors, anchors, anchors, settings, 7, numbers(many), numbers(many), numbers(many), numbers(many)),
        *(settings, anchors, chain),
    )
    draft.fuse(empty(splits(targets * d), rows, d), empty(d), out, c.norm_eps, out, "a8")
    cos, ring = empty(1024, c.rope_dim // 2), rows_of(Format.KV8, c, act)
    rings = [ring.span(stage * 64, (stage + 1) * 64) for stage in range(stages)]
    draft.keep(
        *(empty(stages, rows, c.head_dim), empty(stages, c.head_dim), rings, 32, cos, cos),
        *(numbers(rows), numbers(rows), act, c.norm_eps),
    )
    table, logits = empty(c.vocab_size, rank, dtype=BF16), empty(many, c.vocab_size)
    draft.markov(
        *(1, chain, table, table, logits, empty(many, d, dtype=act), empty(1, d + rank)),
        *(empty(count, c.vocab_size), empty(count, block)),
    )


BF16, F32 = torch.bfloat16, torch.float32
# Each kernel for Hopper as it is launched there: what attends in float32, since attention/decode.cu has BF16
# at published sizes. For Blackwell what multiplies. All of it for all GPUs: -m slow.
LAUNCHES = (launch_index, launch_attend, launch_prepare, launch_quantize, launch_draft)
QUICK = [("flash", BF16, 90, launch) for launch in LAUNCHES if launch is not launch_attend]
QUICK += [("flash", BF16, capability, launch_index) for capability in (100, 120)]
QUICK += [("tiny", F32, 90, launch) for launch in (launch_index, launch_attend)]
ALL = [(name, BF16, c, launch) for name in ("flash", "pro") for c in ARCHITECTURES for launch in LAUNCHES]
ALL += [("tiny", F32, 90, launch) for launch in LAUNCHES]
EACH = [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in ALL if case not in QUICK)]


@pytest.mark.parametrize(("name", "act", "capability", "launch"), EACH)
def test_compiles(
    name: str, act: torch.dtype, capability: int, launch: Callable[[ModelConfig, torch.dtype], None]
) -> None:
    found: list[tuple[str, Any]] = []
    note = lambda kernel, made: found.append((kernel, made))  # noqa: E731
    with compiling(note, capability):
        launch(preset(name), act)
    assert found
    for kernel, made in found:
        check_fits(kernel, made, capability)
        ptx = made.asm["ptx"]
        # The two products run on tensor cores, and keys are read 16 bytes at a time.
        if kernel == "_scores_kernel" or (kernel == "_attend_kernel" and act is torch.bfloat16):
            assert "mma" in ptx and "ld.global.cg.v4" in ptx, kernel
        if kernel == "_markov_kernel":  # a table of 66 MB is read 16 bytes at a time, before the wait
            before = ptx.partition("griddepcontrol.wait")[0]
            assert before.count("ld.global.v4.b32") >= 8, kernel
        # These clamp, and NaN must pass: the interpreter's maximum lets it pass in any case.
        if kernel in ("_scores_kernel", "_prepare_kernel", "_keep_kernel"):
            assert "max.NaN.f32" in ptx, kernel
