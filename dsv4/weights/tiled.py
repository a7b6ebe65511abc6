"""Loads a checkpoint in the GPU kernels' tiles: streamed batch by batch, experts into their bank."""

from dataclasses import replace

import torch
from torch import Tensor

from dsv4.errors import CheckpointError
from dsv4.gpu.shapes import Form
from dsv4.gpu.tiles import Bank, Tiled, can_stack, empty, put_stack, tile
from dsv4.model.bundle import Weights
from dsv4.ops.experts.placement import Placement
from dsv4.parallel.reading import Share
from dsv4.quant.codec import decode
from dsv4.quant.formats import Format, QuantTensor
from dsv4.weights.batches import EXPERT, Batch
from dsv4.weights.detect import Source
from dsv4.weights.findings import Findings
from dsv4.weights.load import Checkpoint, Counted, Progress, recode
from dsv4.weights.sizes import tiled_format, tiled_source_bytes
from dsv4.weights.stack import Stack, stack_of

# Stored bytes per copy to a GPU, and per group of launches.
BATCH_BYTES = 128 << 20
# As halves of a pair, and the down projection.
_PLACE = {"w1": ("w13", 0), "w3": ("w13", 1), "w2": ("w2", 0)}


def load_tiled(
    checkpoint: Checkpoint,
    device: str | torch.device,
    progress: Progress | None = None,
    placement: Placement | None = None,
    drafts: Placement | None = None,
    *,
    share: Share | None = None,
) -> Weights:
    """As Checkpoint.load, with Tiled for linears and one Bank per layer's experts.

    With `placement` each routed expert is written where it will lie, with `drafts` those of draft blocks;
    nothing is held twice.
    """
    target, inventory = torch.device(device), checkpoint.inventory
    with checkpoint.reader as reader:
        tiler = _Tiler(checkpoint, target, [where for where in (placement, drafts) if where])
        count = Counted(progress, inventory)
        for batch, stored in checkpoint.stream(BATCH_BYTES, target, share, together=True):
            tiler.take(batch, stored, count)
            count.tell()
        tensors = tiler.finish()
        reader.check_unchanged()
    if target.type == "cuda":
        torch.cuda.synchronize(target)  # copies of experts to host memory too
        torch.cuda.empty_cache()
    return Weights(tensors, inventory.quantised, inventory.num_mtp_layers, placement, drafts=drafts)


class _Tiler:
    """Makes tiles of batches, with launches alone: what they find wrong shows a batch later."""

    def __init__(self, checkpoint: Checkpoint, device: torch.device, placements: list[Placement]) -> None:
        self._checkpoint, self._device, self._placements = checkpoint, device, placements
        self._own = checkpoint.inventory.experts
        self._sources = {source.param.name: source for source in checkpoint.inventory.sources}
        self._tensors: dict[str, Tensor | QuantTensor | Tiled | Bank] = {}
        self._whole: dict[str, Tensor] = {}  # what is recoded when all of it is here
        self._findings = Findings(checkpoint, device)

    def take(self, batch: Batch, stored: Tensor, count: Counted) -> None:
        banks: dict[str, list[tuple[Stack, list[Source]]]] = {}
        for part in batch.parts:
            stack, sources = stack_of(part, stored, self._sources)
            if stack is None or sources is None:
                continue
            count.add(stack, sources)
            name, kind = sources[0].param.name, sources[0].param.kind
            if kind in ("plain", "table"):
                self._tensors[name] = self._findings.checked_plain(stack.data, sources[0])
            elif match := EXPERT.fullmatch(name):
                banks.setdefault(match[1], []).append((stack, sources))
            else:
                self._take_linear(name, sources[0], stack)
        for name, stacks in banks.items():
            self._take_experts(name, stacks)
        self._findings.end_batch()

    def finish(self) -> dict[str, Tensor | QuantTensor | Tiled | Bank]:
        fits = self._findings.finish()
        for name, values in self._whole.items():
            rows, cols = values.shape
            self._tensors[name] = tile(recode(QuantTensor(Format.BF16, values, (rows, cols))))
        for (name, part), found in fits.items():
            held = self._tensors[name]
            if isinstance(held, Bank):
                self._tensors[name] = replace(held, **{part: found.of(getattr(held, part))})
            elif isinstance(held, Tiled):
                self._tensors[name] = found.of(held)
        return self._tensors

    def _take_linear(self, name: str, source: Source, stack: Stack) -> None:
        """Some rows of it, as they come."""
        rows, span = _shape(source), slice(stack.first, stack.first + len(stack.data))
        self._findings.check(stack, [source])
        if source.param.stays_in_rows:
            assert stack.format is not None
            if name not in self._tensors:
                self._tensors[name] = QuantTensor(stack.format, stack.data.new_empty(rows), rows)
            held = self._tensors[name]
            assert isinstance(held, QuantTensor)
            held.data[span] = stack.data
            return
        stack = self._as_held(stack, [source])
        if self._checkpoint.is_recoded(source):
            self._whole.setdefault(name, stack.data.new_empty(rows))[span] = stack.data
            return
        if name not in self._tensors:
            assert stack.format is not None
            self._tensors[name] = empty(stack.format, rows, 1, 1, self._device)
        tiled = self._tensors[name]
        assert isinstance(tiled, Tiled)
        to = tiled.rows(span.start, span.stop)
        self._findings.add_fits((name, ""), put_stack(to, [0], 0, stack.quant(), stack.factor))

    def _as_held(self, stack: Stack, sources: list[Source]) -> Stack:
        """In the format it is tiled in."""
        format = tiled_format(sources[0])
        if format is stack.format:
            return stack
        values = decode(stack.quant())
        rounded = values.to(torch.bfloat16)
        # The reference itself rounds a grouped FP8 weight to BF16.
        if stack.format is Format.F32:
            same = (rounded.float() == values).view(len(stack), -1).all(1)
            self._findings.expect(same, sources)
        return replace(stack, data=rounded, scale=None, format=format)

    def _take_experts(self, name: str, stacks: list[tuple[Stack, list[Source]]]) -> None:
        """Some experts of a bank, all three matrices of each."""
        placement = next((p for p in self._placements if name in p.names), None)
        if name not in self._tensors:
            self._tensors[name] = placement.bank(name) if placement else self._empty_bank(stacks[0][1][0])
        bank = self._tensors[name]
        assert isinstance(bank, Bank)
        numbers = list(dict.fromkeys(_number(source) for _, sources in stacks for source in sources))
        if placement is None:
            to, row_of = bank, {number: number - self._own.start for number in numbers if number is not None}
        else:  # made side by side, then brought to where each lies
            form = placement.form
            to = _room(form.format, form.width, form.hidden, len(numbers), self._device)
            row_of = {number: row for row, number in enumerate(numbers) if number is not None}
        for stack, sources in stacks:
            self._findings.check(stack, sources)
            stack = self._as_held(stack, sources)
            half_of, half = _PLACE[_which(sources[0])]
            tiled = getattr(to, half_of)
            if stack.format is None or stack.format is not tiled.format:
                raise CheckpointError(
                    f"{sources[0].weight.name} is {stack.format} and other experts of the layer are "
                    f"{tiled.format}; the GPU kernels need one format per layer: convert the checkpoint, or "
                    "use --device cpu"
                )
            rows = [row_of.get(_number(source), 0) for source in sources]  # type: ignore[arg-type]
            if not can_stack(tiled.format, tiled.shape[0]):
                for number, row in enumerate(rows):
                    one = stack.one(number)
                    fits = put_stack(tiled, [row], half, one.quant(), one.factor)
                    self._findings.add_fits((name, half_of), fits)
                continue
            fits = put_stack(tiled, rows, half, stack.quant(), stack.factor)
            self._findings.add_fits((name, half_of), fits)
        if placement is not None:
            for number, row in row_of.items():
                where = placement.expert(name, number)
                for half_of in ("w13", "w2"):
                    source, target = getattr(to, half_of), getattr(where, half_of)
                    target.data.copy_(source.data[row : row + 1], non_blocking=True)
                    target.scale.copy_(source.scale[row : row + 1], non_blocking=True)
                    target.factor.copy_(source.factor[row : row + 1])

    def _empty_bank(self, source: Source) -> Bank:
        count = len(self._own) if source.param.expert is not None else 1
        rows, cols = _shape(source)
        width, hidden = (cols, rows) if _which(source) == "w2" else (rows, cols)
        return _room(tiled_format(source), width, hidden, count, self._device)


def _room(format: Format, width: int, hidden: int, count: int, device: torch.device) -> Bank:
    up = empty(format, (width, hidden), count, 2, device)
    return Bank(up, empty(format, (hidden, width), count, 1, device))


def _shape(source: Source) -> tuple[int, int]:
    rows, cols = source.param.shape
    return rows, cols


def _which(source: Source) -> str:
    return source.param.name.rpartition(".")[2]


def _number(source: Source) -> int | None:
    """None: a shared expert."""
    return source.param.expert


def tiled_bytes(checkpoint: Checkpoint) -> int:
    """Memory that `load_tiled` takes, to the byte."""
    sources = checkpoint.inventory.sources
    return sum(
        tiled_source_bytes(replace(source, format=Format.NVFP4) if checkpoint.is_recoded(source) else source)
        for source in sources
    )


def expert_bytes(checkpoint: Checkpoint) -> int:
    """Of `tiled_bytes` what the layers' routed experts take."""
    return sum(tiled_source_bytes(s) for s in checkpoint.inventory.sources if _is_routed(s))


def _is_routed(source: Source, of: str = "layers.") -> bool:
    """An expert of a layer, or of a draft."""
    return source.param.expert is not None and source.param.name.startswith(of)


def expert_form(checkpoint: Checkpoint) -> tuple[Form, list[str]]:
    """The form of the layers' routed experts, and the names of their banks."""
    formats, names = _formats(checkpoint, "layers.")
    if len(formats) > 1:
        found = ", ".join(f"{name} is {format}" for format, name in formats.items())
        raise CheckpointError(
            f"experts can lie in host memory where all are stored alike, but {found}; use --spill off"
        )
    c = checkpoint.config
    return Form(next(iter(formats)), c.expert_width, c.hidden_size), names


def draft_form(checkpoint: Checkpoint) -> tuple[Form, list[str]] | None:
    """The same of draft blocks; None without, or where their experts are not stored alike."""
    formats, names = _formats(checkpoint, "mtp.")
    c = checkpoint.config
    return (Form(next(iter(formats)), c.expert_width, c.hidden_size), names) if len(formats) == 1 else None


def _formats(checkpoint: Checkpoint, of: str) -> tuple[dict[Format, str], list[str]]:
    """How routed experts are held, each way with the name of one; and the names of their banks."""
    names: dict[str, None] = {}
    formats: dict[Format, str] = {}
    for source in checkpoint.inventory.sources:
        if _is_routed(source, of):
            names[source.param.name.rsplit(".", 2)[0]] = None
            formats.setdefault(tiled_format(source), source.param.name)
    return formats, list(names)
