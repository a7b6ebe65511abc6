"""Streams a checkpoint into memory, a few rows at a time. What is missing or left over is refused before."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from dsv4.config import ModelConfig
from dsv4.errors import CheckpointError, ConfigError
from dsv4.model.bundle import Weights
from dsv4.model.params import check_ranks, own_experts
from dsv4.parallel.reading import Share
from dsv4.quant.codec import NV_RANGE, decode, encode_weight, has_nan_scale
from dsv4.quant.formats import Format, QuantTensor
from dsv4.weights.batches import Batch, plan
from dsv4.weights.detect import Inventory, Source, read_headers
from dsv4.weights.feed import stream
from dsv4.weights.reader import Reader
from dsv4.weights.sizes import held_bytes
from dsv4.weights.stack import Stack, stack_of

# Decoded bytes handled at a time: bounds what loading needs beyond the model itself.
BLOCK_BYTES = 64 << 20
# Stored bytes read ahead at a time on a CPU; four bits decode to eight times as much.
CPU_BATCH_BYTES = 16 << 20

Progress = Callable[[int, int], None]  # stored bytes done, stored bytes in all


@dataclass(frozen=True)
class Checkpoint:
    """A model folder whose headers were read and checked; no weight has been read yet."""

    config: ModelConfig
    reader: Reader
    inventory: Inventory
    head: str = "stored"  # or nvfp4: made of the stored values at load
    whole: Inventory | None = None  # of all ranks; None: this is the only one

    @classmethod
    def open(cls, path: str | Path) -> "Checkpoint":
        return cls(*read_headers(path))

    def shard(self, rank: int, size: int, whole_experts: bool = False) -> "Checkpoint":
        """A rank's shares of the weights; sizes that do not split are refused."""
        check_ranks(self.config, size, whole_experts)
        own = own_experts(self.config, rank, size) if whole_experts else None
        return replace(self, inventory=self.inventory.shard(rank, size, own), whole=self.inventory)

    def without_drafts(self) -> "Checkpoint":
        """The trunk alone: nothing of the draft block or stages is read, held or counted."""
        return replace(self, inventory=self.inventory.without_drafts())

    def with_head(self, head: str, ranks: int) -> "Checkpoint":
        """`head`: as EngineConfig has it. A head that is stored quantised stays as it is."""
        source = next(source for source in self.inventory.sources if source.param.name == "head")
        if head == "stored" or source.format is Format.NVFP4:
            return self
        if source.is_quantised:
            raise ConfigError(
                f"head {head} is made of BF16, and the stored one is {source.format}; leave it out"
            )
        if ranks > 1:
            raise ConfigError(
                f"head {head} has one scale for all rows, and {ranks} ranks share them; leave it out"
            )
        return replace(self, head=head)

    def is_recoded(self, source: Source) -> bool:
        """Whether this weight is held in NVFP4 although it is stored otherwise."""
        return self.head == "nvfp4" and source.param.name == "head"

    def held_bytes(self, dense: bool) -> int:
        """Memory that `load` takes, to the byte."""
        recoded = [
            replace(s, format=Format.NVFP4) if self.is_recoded(s) else s for s in self.inventory.sources
        ]
        return sum(held_bytes(source, dense) for source in recoded)

    def stream(
        self, limit: int, device: torch.device, share: Share | None, together: bool = False
    ) -> Iterator[tuple[Batch, Tensor]]:
        """What this rank reads; with `share`, what all ranks of the machine read, of which it has a part."""
        whole = self.inventory if share is None or self.whole is None else self.whole
        return stream(self.reader, plan(whole.sources, limit, together), device, share)

    def load(
        self,
        dense: bool,
        device: str | torch.device = "cpu",
        progress: Progress | None = None,
        share: Share | None = None,
    ) -> Weights:
        """dense: decode linears to float32 [K, N] now; else keep them as stored."""
        target, inventory = torch.device(device), self.inventory
        own = {source.param.name: source for source in inventory.sources}
        held = {name: _Held(self, source, dense, target) for name, source in own.items()}
        with self.reader as reader:
            count = Counted(progress, inventory)
            for batch, stored in self.stream(CPU_BATCH_BYTES, torch.device("cpu"), share):
                for part in batch.parts:
                    stack, sources = stack_of(part, stored, own)
                    if stack is not None and sources is not None:
                        for number, source in enumerate(sources):
                            held[source.param.name].put(stack.one(number))
                        count.add(stack, sources)
                count.tell()
            reader.check_unchanged()
        tensors = {name: one.finish() for name, one in held.items()}
        return Weights(tensors, inventory.quantised, inventory.num_mtp_layers)


class Counted:
    """Tells progress of stored bytes."""

    def __init__(self, progress: Progress | None, inventory: Inventory) -> None:
        self._progress, self._total, self._done = progress, inventory.num_bytes, 0.0

    def add(self, stack: Stack, sources: list[Source]) -> None:
        """A source that comes in several parts counts in proportion."""
        rows = len(stack.data) // len(sources)
        self._done += sum(source.num_bytes * rows / source.param.shape[0] for source in sources)

    def tell(self) -> None:
        if self._progress is not None:
            self._progress(min(round(self._done), self._total), self._total)


class _Held:
    """One weight on its way from stored rows to the form that it is held in."""

    def __init__(self, checkpoint: Checkpoint, source: Source, dense: bool, device: torch.device) -> None:
        self._checkpoint, self._source, self._device = checkpoint, source, device
        self._is_recoded = checkpoint.is_recoded(source)
        kind = source.param.kind
        self._is_plain = kind in ("table", "plain")
        self._dense = dense and not self._is_plain and not source.param.is_embedding
        to_bf16 = kind == "grouped" and source.format is Format.FP8
        self._is_decoded = (self._dense and not self._is_recoded) or to_bf16
        self._out: Tensor | QuantTensor | None = None

    def put(self, rows: Stack) -> None:
        if self._is_plain:
            self._out = _plain(rows.data, self._source, self._checkpoint.config).to(self._device)
        elif self._is_decoded:
            self._put_decoded(rows)
        else:
            self._put_stored(rows)

    def finish(self) -> Tensor | QuantTensor:
        out = self._out
        assert out is not None
        if not self._is_recoded:
            return out
        held = recode(out)
        return decode(held).t().contiguous() if self._dense else held

    def _put_stored(self, rows: Stack) -> None:
        q, source = check_scales(rows.quant(float(rows.factor)), self._source), self._source
        _check_codes(q, source, rows.first)
        if self._out is None:
            shape = (source.param.shape[0], q.shape[1])
            scale = None
            if q.scale is not None:
                assert q.scale is not None
                height = -(-shape[0] // source.tile[0])
                scale = q.scale.new_empty(height, q.scale.shape[1], device=self._device)
            data = q.data.new_empty(shape[0], q.data.shape[1], device=self._device)
            self._out = QuantTensor(q.format, data, shape, scale, q.global_scale)
        out = self._out
        assert isinstance(out, QuantTensor)
        out.data[rows.first : rows.first + q.shape[0]] = q.data
        if q.scale is not None and out.scale is not None:
            first = rows.first // source.tile[0]
            out.scale[first : first + q.scale.shape[0]] = q.scale

    def _put_decoded(self, rows: Stack) -> None:
        """float32 [K, N] when dense, else BF16 [N, K]. Grouped FP8 takes BF16 values."""
        source, (total, cols) = self._source, self._source.param.shape
        values = decode(check_scales(rows.quant(float(rows.factor)), source))
        check_finite(values, source, rows.first)
        if source.param.kind == "grouped" and source.format is Format.FP8:
            values = values.to(torch.bfloat16)
        if self._out is None:
            shape, dtype = (cols, total), torch.float32
            if not self._dense:
                shape, dtype = (total, cols), torch.bfloat16
            out = torch.empty(shape, dtype=dtype, device=self._device)
            self._out = out if self._dense else QuantTensor(Format.BF16, out, (total, cols))
        span = slice(rows.first, rows.first + values.shape[0])
        if isinstance(self._out, QuantTensor):
            self._out.data[span] = values.to(self._device)
        else:
            self._out[:, span] = values.t().to(self._device)


def _plain(stored: Tensor, source: Source, config: ModelConfig) -> Tensor:
    """A table of experts, or float32 values; a copy."""
    if source.param.kind != "table":
        plain = stored.reshape(source.param.shape).to(torch.float32, copy=True)
        check_finite(plain, source)
        return plain
    table = stored.reshape(source.param.shape).to(torch.long, copy=True)
    if table.numel() and (int(table.min()) < 0 or int(table.max()) >= config.num_experts):
        raise CheckpointError(
            f"{source.weight.name} names experts {int(table.min())} to {int(table.max())}, "
            f"expected 0 to {config.num_experts - 1}; config.json or the table is of another model"
        )
    return table


def check_stored(checkpoint: Checkpoint, source: Source) -> None:
    """Read a weight again, and raise with the place of what is wrong in it."""
    reader = checkpoint.reader
    if source.format is None:
        _plain(source.read_plain(reader), source, checkpoint.config)
        return
    q = check_scales(source.read_rows(reader, 0, source.param.shape[0]), source)
    _check_codes(q, source)
    if q.format is Format.F32 and not torch.equal(q.data.to(torch.bfloat16).float(), q.data):
        raise CheckpointError(
            f"{source.weight.name} is float32 and its values do not fit BF16, which the GPU kernels need; "
            "convert it (dsv4 quantize --format bf16) or use --device cpu"
        )


def recode(held: Tensor | QuantTensor) -> QuantTensor:
    """Plain values as NVFP4, some rows at a time: what encode_weight makes of all of them."""
    assert isinstance(held, QuantTensor) and held.format.is_plain
    low, high = torch.aminmax(held.data)
    largest = max(abs(float(low)), abs(float(high)))
    scale = largest / NV_RANGE if largest > 0 else 1.0
    step = max(1, BLOCK_BYTES // (4 * held.shape[1]))
    parts = [encode_weight(part, Format.NVFP4, scale) for part in held.data.split(step)]
    scales = torch.cat([part.scale for part in parts if part.scale is not None])
    codes = torch.cat([part.data for part in parts])
    return QuantTensor(Format.NVFP4, codes, held.shape, scales, parts[0].global_scale)


def check_scales(q: QuantTensor, source: Source) -> QuantTensor:
    """The rows as they are, or an error that names the scale that is no number."""
    if has_nan_scale(q):
        is_global = not bool(torch.isfinite(torch.tensor(q.global_scale)))
        entry = (source.global_scale if is_global else source.scale) or source.weight
        raise CheckpointError(
            f"{entry.name} in {entry.file.name} holds a scale that is no finite number; "
            "the checkpoint is damaged: download or convert it again"
        )
    return q


def check_finite(values: Tensor, source: Source, first_row: int = 0, first_col: int = 0) -> None:
    # NaN and infinity show in the extremes, which are found five times as fast as a mask of every value.
    if values.numel() and not bool(torch.isfinite(torch.stack(torch.aminmax(values))).all()):
        _refuse(~torch.isfinite(values), source, first_row, first_col)


def _check_codes(q: QuantTensor, source: Source, first_row: int = 0) -> None:
    """What decoding would show: NaN codes of FP8, NaN or infinity of plain values. 4-bit codes have none."""
    if q.format.is_plain:
        check_finite(q.data, source, first_row)
    elif q.format is Format.FP8:
        _refuse((q.data & 127) == 127, source, first_row)


def _refuse(bad: Tensor, source: Source, first_row: int, first_col: int = 0) -> None:
    if bool(bad.any()):
        row, *col = bad.nonzero()[0].tolist()
        place = [first_row + row, *(first_col + c for c in col)]
        raise CheckpointError(
            f"{source.weight.name} in {source.weight.file.name} holds NaN or infinity, first at {place}; "
            "the checkpoint is damaged: download or convert it again"
        )
