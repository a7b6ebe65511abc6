"""What an engine takes of its device's memory, part by part: for the engine, `dsv4 plan` and `dsv4 bench`."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from dsv4.cache.layout import CacheLayout
from dsv4.config import LayerSpec, ModelConfig
from dsv4.model.params import Param, each_kind, num_parts

if TYPE_CHECKING:
    import torch

DEFAULT_CONTEXT = 32768
DEFAULT_CHUNK, GPU_CHUNK = 512, 4096  # prompt tokens of a step
# Compiled kernels and graphs, and what the allocator rounds up or keeps between two sizes.
RESERVED = 1 << 30
# What a prompt's step takes, beside what was counted: small results, and rounding.
MARGIN = 1.15
# On a CPU: bytes of a logit while a token is drawn and its alternatives are listed (ops/sample/cpu.py); of
# a value of a weight that is decoded, itself and in the order that products read it.
SAMPLED, DECODED = 117, 8
# Of the reference's ops, which import torch (tests/engine/test_memory.py holds these equal): queries that
# attention takes at a time, masks it keeps, rows that an expert multiplies at least, integers before tokens.
RUN, MASKS, FEW, HISTORY = 32, 64, 4, 2056
# Tokens of the longest prompt step that is recorded: with all experts in GPU memory, and with some elsewhere.
RECORDED, RECORDED_SPILLED = 1024, 256
INBOX = 64 << 20  # what other ranks write to, at most
# Rows of a prompt's logits that are made at a time: a long one's would take a gigabyte.
SCORED_ROWS = 64


@dataclass(frozen=True)
class Memory:
    """Bytes. `snapshots` are taken as they are made, `workspace` by a prompt's step, which gives it back."""

    weights: int
    cache: int  # pages of entries and index keys
    state: int  # windows and open blocks
    snapshots: int
    tables: int  # rotations; penalties and tokens of every slot
    copies: int  # weights that the model keeps in a second form
    buffers: int  # of the decode steps, and what recorded prompt steps leave
    workspace: int
    reserved: int = RESERVED
    host: int = 0  # weights in pinned host memory: not the GPU's, so not in the total

    @property
    def total(self) -> int:
        return sum(getattr(self, field.name) for field in fields(self) if field.name != "host")

    @property
    def at_rest(self) -> int:
        """What tensors of an engine that has just been loaded take."""
        return self.total - self.snapshots - self.workspace - self.reserved

    @property
    def beside_weights(self) -> int:
        return self.total - self.weights


def default_context(model: ModelConfig) -> int:
    return min(model.max_positions, DEFAULT_CONTEXT)


def fits_dense(need: int, have: int) -> bool:
    """Whether `weights auto` decodes the weights at load: half the memory stays free for all else."""
    return need <= have // 2


def gpu_memory(
    weights: int,
    layout: CacheLayout,
    dtype: "torch.dtype",
    graph_rows: Sequence[int],
    chunk: int,
    activations: str = "a16",
    unpacks: bool = False,
    spills: bool = False,
    ranks: int = 1,
    whole_experts: bool = False,
    rounds: Sequence[tuple[int, int]] = (),
) -> Memory:
    """`weights`: their bytes in tiles. `graph_rows`: of every decode step that is recorded; or `rounds` of
    speculation, by sequences and drafts. `chunk`: prompt tokens of a step, 0 where no prompt is read;
    `unpacks`: whether it unpacks weights (`unpacks_weights`). `spills`: whether experts lie in host memory.
    `ranks`: of so many this is one; `whole_experts`: with whole experts."""
    from dsv4.gpu.shapes import tile_bytes
    from dsv4.model.step import prompt_sizes
    from dsv4.quant.formats import Format
    from dsv4.step.buffers import buffer_bytes, inbox_bytes, round_bytes

    c, sizes = layout.config, []
    if dtype.itemsize == 2 and graph_rows and ranks == 1:  # a prompt's step on several is not recorded
        sizes = prompt_sizes(chunk, spills)
    buffers = buffer_bytes(
        c=c,
        max_context=layout.max_context,
        dtype=dtype,
        rows=sum(graph_rows),
        activations=activations,
        ranks=ranks,
        whole_experts=whole_experts,
    ) + inbox_bytes(c, max(graph_rows, default=0), ranks)
    if rounds:
        stages = layout.num_mtp_layers
        buffers = round_bytes(c, layout.max_context, rounds, stages, dtype, activations)
        weights += tile_bytes(Format.NVFP4, (c.vocab_size, c.hidden_size))  # the head's copy, for drafts
    return _gpu_memory(weights, layout, buffers, max(sizes, default=0), chunk, unpacks)


def planned_memory(
    weights: int, layout: CacheLayout, chunk: int, unpacks: bool, spills: bool = False, ranks: int = 1
) -> Memory:
    """The same before torch is there, and hardly more: the buffers of decode steps are bounded."""
    c, recorded = layout.config, RECORDED_SPILLED if spills else RECORDED
    rows = min(2 << (layout.num_slots - 1).bit_length(), 64) - 1  # of 1, 2, 4 ... up to 32 together
    buffers = rows * (8 * c.vocab_size + 128 * c.hidden_size + layout.max_context)
    buffers += INBOX if ranks > 1 else 0
    return _gpu_memory(weights, layout, buffers, recorded if ranks == 1 else 0, chunk, unpacks)


def _gpu_memory(
    weights: int, layout: CacheLayout, buffers: int, recorded: int, chunk: int, unpacks: bool
) -> Memory:
    """`recorded`: tokens of the longest prompt step that is recorded."""
    c = layout.config
    results = recorded * c.num_streams * c.hidden_size * layout.rope_itemsize  # what those steps leave
    return Memory(
        weights=weights,
        cache=layout.pool_bytes(),
        state=layout.state_bytes(),
        snapshots=layout.max_snapshots * layout.snapshot_bytes(),
        tables=table_bytes(layout),
        copies=_copied_bytes(c, layout.num_mtp_layers),
        buffers=buffers + results,
        workspace=prompt_bytes(layout, chunk, unpacks) if chunk else 0,
        reserved=RESERVED + (step_bytes(layout, recorded) if chunk and recorded else 0),
    )


def reference_memory(
    weights: int, layout: CacheLayout, chunk: int, decoded: int, ranks: int = 1, drafts: int = 0
) -> Memory:
    """The same where the reference runs. `weights`: their bytes as they are held; `decoded`: values of the
    largest that is decoded at every use, 0 where none is; `drafts`: proposals for a sequence."""
    return Memory(
        weights=weights,
        cache=layout.pool_bytes(),
        state=layout.state_bytes(),
        snapshots=layout.max_snapshots * layout.snapshot_bytes(),
        tables=table_bytes(layout),
        copies=0,
        buffers=0,
        workspace=reference_workspace(layout, chunk, decoded, ranks, drafts),
        reserved=0,
    )


def reference_workspace(
    layout: CacheLayout, chunk: int, decoded: int, ranks: int = 1, drafts: int = 0
) -> int:
    """Bound what a step of the reference takes and gives back: what is alive all the time, and the stage that
    takes most. Never below, mostly within 40 % (tests/engine/test_memory.py)."""
    c, size, slots, context = layout.config, layout.rope_itemsize, layout.num_slots, layout.max_context
    dspark = c.dspark if drafts else None
    least = slots * max(1 + drafts, dspark.block_size if dspark else 0)
    tokens = max(least, min(chunk, slots * context))
    d, n, heads, wide = c.hidden_size, c.num_streams, c.num_heads // ranks, c.index_heads * c.index_dim
    queries, sums, run = heads * c.head_dim, 4 * d * num_parts(c) // ranks, min(tokens, RUN)
    # Compressed entries that a query sees, by kind of layer; those it attends to, and these with its window.
    seen = {layer.kind: context // layer.ratio for layer in c.layers if layer.ratio}
    selects = seen.get("csa", 0) > c.index_topk
    listed = max([0, *(min(count, c.index_topk) if kind == "csa" else count for kind, count in seen.items())])
    columns = (-(-(min(c.window, context) - 1) // RUN) + 1) * RUN + _padded(listed)
    keys = _padded(seen.get("csa", 0))
    choices = tokens * c.experts_per_token
    rows = choices + (FEW - 1) * min(choices, c.num_experts)  # each expert multiplies a few rows at least
    mixing = 4 * tokens * d * n * (n + 2)
    pooling = max([0, *(_pooled_bytes(layout, layer, tokens) for layer in c.layers if layer.ratio)])
    # The indexer's queries, and of a run of them the scores of all keys by head.
    scores = tokens * 32 * wide + keys * (8 * c.index_dim + run * (12 * c.index_heads + 8) + 16)
    # Queries and results; of a run its keys, which each query has of its own where they are selected.
    attention = 16 * tokens * queries
    attention += columns * (12 * run * heads + 12 * c.head_dim * (run if selects else 1))
    experts = rows * (2 * sums + 8 * d + 24 * c.expert_width // ranks) + 2 * tokens * sums
    stages = (mixing, size * tokens * queries + max(pooling, selects * scores), attention, experts)
    streams = size * tokens * d * n
    alive = tokens * (size * d + 24 * listed + 16 * n * n + 12 * c.rope_dim + 256)
    alive += streams * (2 if drafts else 1)
    if dspark:  # taps, each made of a layer's streams, and the drafter's input made of them
        alive += streams + (2 * len(dspark.target_layers) + 1) * size * tokens * d
    logits = streams + SAMPLED * max(least, min(tokens, SCORED_ROWS)) * c.vocab_size // ranks
    masks = 4 * MASKS * run * columns  # kept for other layers and sequences
    return max(alive + max(stages), logits) + DECODED * decoded + masks


def _padded(count: int) -> int:
    """Keys that are multiplied where a query has so many (ops/_exact.py)."""
    step = 64 if count <= 256 else 256
    return -(-count // step) * step


def _pooled_bytes(layout: CacheLayout, layer: LayerSpec, tokens: int) -> int:
    """Values and scores of the step's tokens, and of all rows of the blocks that they close."""
    both = 2 if layer.kind == "csa" else 1  # blocks that overlap, and twice the channels
    row = 4 * both * layout.config.head_dim
    closed = min(tokens, tokens // layer.ratio + layout.num_slots)
    return 2 * row * tokens + (4 * row + 64) * closed * layer.ratio * both


def largest_linear(params: Iterable[Param]) -> int:
    """Values of the largest weight that products read."""
    return max(math.prod(p.shape) for p in params if p.kind in ("linear", "grouped") and not p.is_embedding)


def table_bytes(layout: CacheLayout) -> int:
    """Float32 cosines and sines, for sliding and for compressed layers where there are such; penalties."""
    rotations = len({layer.ratio > 0 for layer in layout.layers})
    dspark = layout.config.dspark
    rotated = rotations * layout.max_context * layout.config.rope_dim * 4
    rotated += dspark.block_size * layout.config.rope_dim * 4 if dspark else 0
    return rotated + layout.num_slots * (HISTORY + layout.max_context) * 4


def _copied_bytes(c: ModelConfig, num_mtp_layers: int) -> int:
    """Prompts multiply with the transposed `fn` of every hyper-connection."""
    kinds = each_kind(c, num_mtp_layers)
    return sum(4 * math.prod(param.shape) * count for param, count in kinds if param.name.endswith("_fn"))


def unpacks_weights(itemsize: int, capability: tuple[int, int]) -> bool:
    """Whether a prompt's products unpack weights; on Hopper, in bfloat16, they decode them in registers."""
    return itemsize != 2 or capability[0] != 9


def _row_bytes(c: ModelConfig, itemsize: int) -> int:
    """Of one token in a prompt's step: in attention or among the experts, whichever has more at a time."""
    heads, hidden, choices = c.num_heads * c.head_dim, c.hidden_size, c.experts_per_token
    # The streams; the input, before its norm and after it, packed for weights of two kinds.
    always = c.num_streams * hidden + 5 * hidden
    # Queries, and the indexer's or their results; then these, where attention did not pack them also packed,
    # and the product of that.
    indexer = 2 * c.index_heads * c.index_dim + 4 * c.head_dim
    attention = heads + max(heads + c.o_groups * c.o_rank, indexer)
    # The shared expert's result; of every choice the input, what lies between its products, and the result;
    # their float32 sum.
    experts = hidden + choices * (2 * hidden + c.expert_width) + 4 * hidden // itemsize
    return itemsize * (always + max(attention, experts))


def step_bytes(layout: CacheLayout, tokens: int) -> int:
    """What a prompt's step of so many tokens takes beside weights. Recorded steps keep it: all share the
    memory of the largest. Beside its rows, those are a layer's entries as values and the scores of its index
    keys (ops/attention/prefill.py, ops/index/prefill.py)."""
    c, itemsize = layout.config, layout.rope_itemsize
    entries = max((layout.num_pages * layout.page_entries(s) for s in layout.layers if s.ratio), default=0)
    scored = max((layout.max_context // s.ratio for s in layout.layers if s.kind == "csa"), default=0)
    decoded = min((entries + tokens) * c.head_dim * itemsize, 512 << 20)
    return int(MARGIN * _row_bytes(c, itemsize) * tokens) + decoded + min(4 * tokens * scored, 256 << 20)


def prompt_bytes(layout: CacheLayout, chunk: int, unpacks: bool) -> int:
    """What a step of so many prompt tokens takes and gives back on a GPU: an estimate on the safe side."""
    c = layout.config
    # Sixteen experts at a time, and as much again.
    unpacked = 4 * 16 * 3 * 2 * c.expert_width * c.hidden_size if unpacks else 0
    return step_bytes(layout, min(chunk, layout.max_context)) + min(unpacked, 3 << 30)
