"""Streams a checkpoint into memory, a few tensor rows at a time. Missing or left over is an error before that."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from dsv4.config import ModelConfig
from dsv4.errors import CheckpointError
from dsv4.model.bundle import Weights
from dsv4.quant.codec import decode, has_nan_scale
from dsv4.quant.formats import FP8_TILE, Format, QuantTensor
from dsv4.weights.detect import Inventory, Source, take_inventory
from dsv4.weights.reader import Reader

# Decoded bytes handled at a time: bounds what loading needs beyond the model itself.
BLOCK_BYTES = 64 << 20

Progress = Callable[[int, int], None]  # stored bytes done, stored bytes in all


@dataclass(frozen=True)
class Checkpoint:
    """A model folder whose headers were read and checked; no weight has been read yet."""

    config: ModelConfig
    reader: Reader
    inventory: Inventory

    @classmethod
    def open(cls, path: str | Path) -> "Checkpoint":
        config = ModelConfig.load(path)
        reader = Reader(path)
        return cls(config, reader, take_inventory(reader.entries, config))

    def dense_bytes(self) -> int:
        """Memory of the model with every linear decoded to float32."""
        total = 0
        for source in self.inventory.sources:
            count = 1
            for size in source.param.shape:
                count *= size
            total += count * (2 if source.param.name == "embed" else 8 if source.param.kind == "table" else 4)
        return total

    def load(self, dense: bool, device: str | torch.device = "cpu", progress: Progress | None = None) -> Weights:
        """dense: decode linears to float32 [K, N] now; else keep them as stored."""
        tensors: dict[str, Tensor | QuantTensor] = {}
        total, done = self.inventory.num_bytes, 0
        with self.reader as reader:
            for source in self.inventory.sources:
                tensors[source.param.name] = _load_one(reader, source, dense, device, self.config)
                done += source.num_bytes
                if progress:
                    progress(done, total)
        quantised = frozenset(s.param.name for s in self.inventory.sources if s.is_quantised)
        return Weights(tensors, quantised, self.inventory.num_mtp_layers)


def _load_one(
    reader: Reader, source: Source, dense: bool, device: str | torch.device, config: ModelConfig
) -> Tensor | QuantTensor:
    kind, name = source.param.kind, source.param.name
    if kind == "table":
        table = source.read_plain(reader).long()
        if table.numel() and (int(table.min()) < 0 or int(table.max()) >= config.num_experts):
            raise CheckpointError(
                f"{source.weight.name} names experts {int(table.min())} to {int(table.max())}, "
                f"expected 0 to {config.num_experts - 1}"
            )
        return table.to(device)
    if kind == "plain":
        plain = source.read_plain(reader).float()
        _check_finite(plain, source)
        return plain.to(device)
    if name == "embed" or not (dense or kind == "grouped"):
        return _move(_checked(source.read_rows(reader, 0, source.param.shape[0]), source), device)
    return _decoded(reader, source, dense, device)


def _decoded(reader: Reader, source: Source, dense: bool, device: str | torch.device) -> Tensor | QuantTensor:
    """Row blocks, decoded: float32 [K, N] when dense, else BF16 [N, K]. A grouped weight takes BF16 values."""
    rows, cols = source.param.shape
    block = max(FP8_TILE, BLOCK_BYTES // (4 * cols) // FP8_TILE * FP8_TILE)
    out = torch.empty((cols, rows) if dense else (rows, cols), dtype=torch.float32 if dense else torch.bfloat16)
    for start in range(0, rows, block):
        stop = min(rows, start + block)
        values = decode(_checked(source.read_rows(reader, start, stop), source))
        _check_finite(values, source)
        if source.param.kind == "grouped" and source.format is Format.FP8:
            values = values.to(torch.bfloat16)
        if dense:
            out[:, start:stop] = values.t()
        else:
            out[start:stop] = values
    out = out.to(device)
    return out if dense else QuantTensor(Format.BF16, out, (rows, cols))


def _checked(q: QuantTensor, source: Source) -> QuantTensor:
    if has_nan_scale(q):
        name = (source.scale or source.weight).name
        raise CheckpointError(f"{name} holds NaN or infinite scales; the checkpoint is damaged: convert it again")
    return q


def _check_finite(values: Tensor, source: Source) -> None:
    if not bool(torch.isfinite(values).all()):
        where = (~torch.isfinite(values)).nonzero()[0].tolist()
        raise CheckpointError(
            f"{source.weight.name} holds NaN or infinity, first at {where}; the checkpoint is damaged"
        )


def _move(q: QuantTensor, device: str | torch.device) -> QuantTensor:
    scale = None if q.scale is None else q.scale.to(device)
    return QuantTensor(q.format, q.data.to(device), q.shape, scale, q.global_scale, q.rope_dim)
