"""Streams a checkpoint into memory, a few rows at a time. What is missing or left over is refused before."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from dsv4.config import ModelConfig
from dsv4.errors import CheckpointError, ConfigError
from dsv4.model.bundle import Weights
from dsv4.model.params import check_ranks, own_experts
from dsv4.quant.codec import NV_RANGE, decode, encode_weight, has_nan_scale
from dsv4.quant.formats import FP8_TILE, Format, QuantTensor
from dsv4.weights.detect import Inventory, Source, read_headers
from dsv4.weights.reader import Reader
from dsv4.weights.sizes import held_bytes

# Decoded bytes handled at a time: bounds what loading needs beyond the model itself.
BLOCK_BYTES = 64 << 20

Progress = Callable[[int, int], None]  # stored bytes done, stored bytes in all


@dataclass(frozen=True)
class Checkpoint:
    """A model folder whose headers were read and checked; no weight has been read yet."""

    config: ModelConfig
    reader: Reader
    inventory: Inventory
    head: str = "stored"  # or nvfp4: made of the stored values at load

    @classmethod
    def open(cls, path: str | Path) -> "Checkpoint":
        return cls(*read_headers(path))

    def shard(self, rank: int, size: int, whole_experts: bool = False) -> "Checkpoint":
        """A rank's shares of the weights; sizes that do not split are refused."""
        check_ranks(self.config, size, whole_experts)
        own = own_experts(self.config, rank, size) if whole_experts else None
        return replace(self, inventory=self.inventory.shard(rank, size, own))

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

    def load(
        self, dense: bool, device: str | torch.device = "cpu", progress: Progress | None = None
    ) -> Weights:
        """dense: decode linears to float32 [K, N] now; else keep them as stored."""
        tensors: dict[str, Tensor | QuantTensor] = {}
        total, done = self.inventory.num_bytes, 0
        with self.reader as reader:
            for source in self.inventory.sources:
                if self.is_recoded(source):
                    held = recode(load_one(reader, source, False, device, self.config))
                    tensors[source.param.name] = decode(held).t().contiguous() if dense else held
                else:
                    tensors[source.param.name] = load_one(reader, source, dense, device, self.config)
                done += source.num_bytes
                if progress:
                    progress(done, total)
        return Weights(tensors, self.inventory.quantised, self.inventory.num_mtp_layers)


def load_one(
    reader: Reader, source: Source, dense: bool, device: str | torch.device, config: ModelConfig
) -> Tensor | QuantTensor:
    kind, name = source.param.kind, source.param.name
    if kind == "table":
        table = source.read_plain(reader).long()
        if table.numel() and (int(table.min()) < 0 or int(table.max()) >= config.num_experts):
            raise CheckpointError(
                f"{source.weight.name} names experts {int(table.min())} to {int(table.max())}, "
                f"expected 0 to {config.num_experts - 1}; config.json or the table is of another model"
            )
        return table.to(device)
    if kind == "plain":
        plain = source.read_plain(reader).float()
        check_finite(plain, source)
        return plain.to(device)
    to_bf16 = kind == "grouped" and source.format is Format.FP8
    if name == "embed" or not (dense or to_bf16):
        held = check_scales(source.read_rows(reader, 0, source.param.shape[0]), source)
        _check_codes(held, source)
        return move(held, device)
    return _decoded(reader, source, dense, device)


def _decoded(reader: Reader, source: Source, dense: bool, device: str | torch.device) -> Tensor | QuantTensor:
    """Row blocks, decoded: float32 [K, N] when dense, else BF16 [N, K]. Grouped FP8 takes BF16 values."""
    rows, cols = source.param.shape
    block = max(FP8_TILE, BLOCK_BYTES // (4 * cols) // FP8_TILE * FP8_TILE)
    out = torch.empty(
        (cols, rows) if dense else (rows, cols), dtype=torch.float32 if dense else torch.bfloat16
    )
    for start in range(0, rows, block):
        stop = min(rows, start + block)
        values = decode(check_scales(source.read_rows(reader, start, stop), source))
        check_finite(values, source, start)
        if source.param.kind == "grouped" and source.format is Format.FP8:
            values = values.to(torch.bfloat16)
        if dense:
            out[:, start:stop] = values.t()
        else:
            out[start:stop] = values
    out = out.to(device)
    return out if dense else QuantTensor(Format.BF16, out, (rows, cols))


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


def _check_codes(q: QuantTensor, source: Source) -> None:
    """What decoding would show: NaN codes of FP8, NaN or infinity of plain values. 4-bit codes have none."""
    if q.format is not Format.FP8 and not q.format.is_plain:
        return
    step = max(1, BLOCK_BYTES // (4 * q.shape[1]))
    for start in range(0, q.shape[0], step):
        part = q.data[start : start + step]
        _refuse((part & 127) == 127 if q.format is Format.FP8 else ~torch.isfinite(part), source, start)


def _refuse(bad: Tensor, source: Source, first_row: int, first_col: int = 0) -> None:
    if bool(bad.any()):
        row, *col = bad.nonzero()[0].tolist()
        place = [first_row + row, *(first_col + c for c in col)]
        raise CheckpointError(
            f"{source.weight.name} in {source.weight.file.name} holds NaN or infinity, first at {place}; "
            "the checkpoint is damaged: download or convert it again"
        )


def move(q: QuantTensor, device: str | torch.device) -> QuantTensor:
    scale = None if q.scale is None else q.scale.to(device)
    return QuantTensor(q.format, q.data.to(device), q.shape, scale, q.global_scale, q.rope_dim)
