"""What a decode step writes, for a fixed number of rows; and how much memory that is. Without Triton."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dsv4.config import LayerSpec, ModelConfig
from dsv4.gpu.pdl import tensors_of
from dsv4.gpu.shapes import MIX_WIDTH, attend_chunks, mix_chunks
from dsv4.ops.attention import decode as attention
from dsv4.ops.exchange.decode import inbox_places
from dsv4.ops.linear.decode import Tasks, splits
from dsv4.ops.sample import decode as sample
from dsv4.quant.formats import Format, QuantTensor, empty_rows

ROWS = (1, 2, 4, 8, 16, 32)
MOST_DRAFTED, FEW_DRAFTS = 24, 3  # rows of a round of speculation; drafts of its smaller kind


@dataclass(frozen=True)
class Mutual:
    """Rows in blocks of one sequence each, that all see their whole block and the ring up to `ends`.

    Their entries are kept in `scratch`, a block after the other, and not in the ring.
    """

    scratch: QuantTensor  # KV8 [rows]
    block: int  # rows of a sequence
    sequences: Tensor  # int64 [rows]: the row's block
    listed: Tensor  # int32 [rows, block]: the rows of `scratch` that a row sees
    ends: Tensor  # int64 [rows]: the last position in the ring that it sees


class Buffers:
    """Everything a step of `rows` rows writes, shared by all layers."""

    def __init__(
        self,
        c: ModelConfig,
        rows: int,
        max_context: int,
        dtype: torch.dtype,
        device: str | torch.device,
        activations: str = "a16",
        ranks: int = 1,
        whole_experts: bool = False,
        block: int = 0,
        taps: bool = False,
    ) -> None:
        """`ranks`: of so many this is one, with its share of heads, output groups, expert width and head.
        `whole_experts`: but with some of the routed experts in all their width. `block`: rows that attend to
        each other, beside what lies in the window. `taps`: the step leaves what DSpark sees of it."""

        def act(*shape: int) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        def wide(*shape: int) -> Tensor:
            return torch.zeros(*shape, device=device)

        d, n, h = c.hidden_size, c.num_streams, c.num_heads // ranks
        groups, shared_width = c.o_groups // ranks, c.expert_width // ranks
        expert_width = c.expert_width if whole_experts else shared_width
        self.rows = rows
        # What the host loads, in one copy: token, position and slot of a row, and how its next one is chosen.
        self.inputs = torch.zeros(3 + sample.WIDTH, rows, dtype=torch.long, device=device)
        self.ids, self.positions, self.slots = self.inputs[:3]
        self.settings = self.inputs[3:].view(rows, sample.WIDTH)
        self.positions.fill_(-1)
        self.mask = torch.zeros(rows, -(-c.vocab_size // 32), dtype=torch.int32, device=device)
        self.out = torch.zeros(rows, sample.RESULT, dtype=torch.int32, device=device)
        self.streams, self.x = act(rows, n, d), act(rows, d)
        # Of each target layer, its streams averaged.
        self.taps = act(rows, len(c.dspark.target_layers) * d) if taps and c.dspark else None
        # x and q_low as quantised products see them.
        rounds = activations != "a16"
        self.x_in = act(rows, d) if rounds else None
        self.q_in = act(rows, c.q_rank) if rounds else None
        # The largest magnitude of u, for a single row (linear/decode.py).
        self.u_top = torch.zeros(rows, dtype=torch.int32, device=device) if activations == "a4" else None
        self.partial = wide(rows, mix_chunks(d), MIX_WIDTH)
        self.gate, self.comb = wide(rows, n), wide(rows, n, n)
        self.q_raw, self.q_low, self.kv = act(rows, c.q_rank), act(rows, c.q_rank), act(rows, c.head_dim)
        self.values, self.scores = wide(rows, 2 * c.head_dim), wide(rows, 2 * c.head_dim)
        self.key_values, self.key_scores = wide(rows, 2 * c.index_dim), wide(rows, 2 * c.index_dim)
        self.q, self.iq = act(rows, h, c.head_dim), act(rows, c.index_heads, c.index_dim)
        self.index_weights = act(rows, c.index_heads)
        # Each layer kind has its own number of places for compressed entries.
        entries = [block] + [max_context // layer.ratio for layer in c.layers if layer.kind == "hca"]
        csa = [max_context // layer.ratio for layer in c.layers if layer.kind == "csa"]
        self.selects = any(c.selects(layer.ratio, max_context) for layer in c.layers if layer.kind == "csa")
        entries += [min(c.index_topk, e) if self.selects else e for e in csa]
        # Where one launch does it all, no parts are kept (attention.py).
        ratios = {spec.ratio for spec in c.layers}
        self.attends_in_one = attention.serves(h, c.head_dim, c.rope_dim, dtype, ratios)
        self.index_scores = wide(rows, max(csa) if self.selects else 1)
        self.chosen_rows = torch.full((rows, c.index_topk), -1, dtype=torch.int32, device=device)
        chunks = 0 if self.attends_in_one else attend_chunks(dtype, c.window, max(entries))
        self.part_o, self.part_ml = wide(rows, chunks, h, c.head_dim), wide(rows, chunks, h, 2)
        self.o, self.u = act(rows, h * c.head_dim), act(rows, groups * c.o_rank)
        self.y = wide(rows, splits(groups * c.o_rank), d)
        self.gate_logits = wide(rows, c.num_experts)
        self.chosen = torch.zeros(rows, c.experts_per_token, dtype=torch.int32, device=device)
        self.tasks = Tasks.empty(rows, c.experts_per_token, device)
        # Of a token's choices, then of the shared expert: side by side, to be rounded in one launch, if they
        # are as wide as each other.
        pairs, step = rows * c.experts_per_token, 8 // math.gcd(8, expert_width)
        shared_at = -(-pairs // step) * step  # a product's input is aligned to 16 bytes
        self.all_hidden = None if whole_experts else act(shared_at + rows, expert_width)
        if self.all_hidden is None:
            self.hidden, self.shared_hidden = act(pairs, expert_width), act(rows, shared_width)
        else:
            self.hidden, self.shared_hidden = self.all_hidden[:pairs], self.all_hidden[shared_at:]
        # What ranks add up stays float32.
        self.moe = (act if ranks == 1 else wide)(rows, c.experts_per_token + 1, d)
        self.logits = wide(rows, c.vocab_size)
        self.own_logits = self.logits if ranks == 1 else wide(rows, c.vocab_size // ranks)
        # What each row of a launch may have to keep between two passes over the K columns of its weights.
        kept = (
            (d, c.q_rank + c.head_dim + c.index_heads),
            (d, c.experts_per_token * 2 * expert_width),
            (c.q_rank, h * c.head_dim + c.index_heads * c.index_dim),
            (c.heads_per_group * c.head_dim, groups * c.o_rank),
            (expert_width, (c.experts_per_token + 1) * d),
        )
        self.carry = wide(rows * max((values for k, values in kept if splits(k) > 1), default=0))

    def chunks(self, dtype: torch.dtype, window: int, entries: int) -> tuple[Tensor, Tensor]:
        """The parts of attention cut to a layer's number of chunks (whole tensors: rows lie apart)."""
        count = attend_chunks(dtype, window, entries)
        rows, _, h, d = self.part_o.shape
        part_o = self.part_o.flatten()[: rows * count * h * d].view(rows, count, h, d)
        return part_o, self.part_ml.flatten()[: rows * count * h * 2].view(rows, count, h, 2)


class DraftBuffers:
    """Everything that a DSpark drafter writes for R sequences, from the rows of the step before."""

    def __init__(
        self,
        c: ModelConfig,
        sequences: int,
        step: Buffers,
        stages: int,
        dtype: torch.dtype,
        device: str | torch.device,
        activations: str = "a16",
        ranks: int = 1,
        whole_experts: bool = False,
    ) -> None:
        """`step`: with taps. `ranks` and `whole_experts` as Buffers has them."""

        def act(*shape: int) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        def wide(*shape: int) -> Tensor:
            return torch.zeros(*shape, device=device)

        def numbers(*shape: int) -> Tensor:
            return torch.full(shape, -1, dtype=torch.long, device=device)

        assert c.dspark is not None and step.taps is not None
        d, block, (rows, columns) = c.hidden_size, c.dspark.block_size, step.taps.shape
        # The rows of the step: taps, slots, and the positions of those that are committed, -1 of others.
        self.taps, self.committed, self.slots = step.taps, numbers(rows), step.slots
        # The sequences: token, position and slot of the anchor, -1: no draft; how its first draft is chosen.
        self.anchors, self.anchors_at = numbers(sequences), numbers(sequences)
        self.anchors_slots = numbers(sequences).zero_()
        self.settings = numbers(sequences, sample.WIDTH).zero_()
        rounds = activations != "a16"
        self.taps_in = act(rows, columns) if rounds else None
        self.main_parts, self.main = wide(splits(columns), rows, d), act(rows, d)
        self.main_in = act(rows, d) if rounds else None
        self.kv = wide(stages, rows, c.head_dim)
        self.layers = Buffers(
            c=replace(c, layers=(LayerSpec("sliding", 0, False),) * stages),
            rows=sequences * block,
            max_context=0,
            dtype=dtype,
            device=device,
            activations=activations,
            ranks=ranks,
            whole_experts=whole_experts,
            block=block,
        )
        number = torch.arange(sequences * block, device=device)
        self.mutual = Mutual(
            scratch=empty_rows(Format.KV8, len(number), c.head_dim, c.rope_dim, dtype, device),
            block=block,
            sequences=number // block,
            listed=(number // block * block).int().unsqueeze(1) + number[:block].int(),
            ends=numbers(len(number)),
        )
        self.mixed = act(len(number), d)
        self.z, self.confidence = wide(sequences, c.vocab_size), wide(sequences, block)
        # Settings and positions of the draft to be chosen next; the anchors, then the drafts of each slot.
        self.choices, self.choices_at = numbers(sequences, sample.WIDTH), numbers(sequences)
        self.chain = numbers(1 + block, sequences)
        self.drafts = self.chain[1:]
        self.out = torch.zeros(sequences, sample.RESULT, dtype=torch.int32, device=device)


def graph_rows(max_batch: int) -> list[int]:
    """Of each graph that an engine for so many sequences makes; the last takes as many as graphs may."""
    enough = [rows for rows in ROWS if rows >= max_batch]
    return [*(rows for rows in ROWS if rows < max_batch), *enough[:1]]


def round_sizes(max_batch: int, num_drafts: int) -> list[tuple[int, int]]:
    """(sequences, drafts of each) of the rounds that an engine with a drafter records: none, a few or as many
    as there are. Large batches do not draft: their steps read most experts anyway."""
    drafts = sorted({min(FEW_DRAFTS, num_drafts), num_drafts})
    sizes = [(seats, number) for seats in graph_rows(max_batch) for number in (0, *drafts)]
    return [(seats, number) for seats, number in sizes if not number or seats * (number + 1) <= MOST_DRAFTED]


def inbox_bytes(c: ModelConfig, rows: int, ranks: int) -> int:
    """What the other ranks' kernels write to, for steps of up to so many rows."""
    return 0 if ranks == 1 else 8 * ranks * inbox_places(rows, c.hidden_size, c.vocab_size // ranks)


def buffer_bytes(
    c: ModelConfig,
    max_context: int,
    dtype: torch.dtype,
    rows: int,
    activations: str = "a16",
    ranks: int = 1,
    whole_experts: bool = False,
) -> int:
    """What `Buffers` allocates: each row as much as the next."""
    one = Buffers(
        c=c,
        rows=1,
        max_context=max_context,
        dtype=dtype,
        device="meta",
        activations=activations,
        ranks=ranks,
        whole_experts=whole_experts,
    )
    return rows * _bytes(one)


def draft_bytes(
    c: ModelConfig, sequences: int, rows: int, stages: int, dtype: torch.dtype, activations: str = "a16"
) -> int:
    """What `DraftBuffers` holds, the step's taps among it."""
    step = Buffers(c, rows, 0, dtype, "meta", activations, taps=True)
    made = DraftBuffers(c, sequences, step, stages, dtype, "meta", activations)
    return _bytes(made) + _bytes(made.layers)


def round_bytes(
    c: ModelConfig,
    max_context: int,
    sizes: Sequence[tuple[int, int]],
    stages: int,
    dtype: torch.dtype,
    activations: str = "a16",
) -> int:
    """What rounds of these sizes allocate."""
    return sum(
        buffer_bytes(c, max_context, dtype, seats * (drafts + 1), activations)
        + draft_bytes(c, seats if drafts else 0, seats * (drafts + 1), stages, dtype, activations)
        for seats, drafts in sizes
    )


def _bytes(buffers: Buffers | DraftBuffers) -> int:
    """Count each memory once."""
    held = tensors_of(list(vars(buffers).values()))
    return sum(
        {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in held}.values()
    )
