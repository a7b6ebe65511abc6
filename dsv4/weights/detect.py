"""Finds how each weight is stored, tensor by tensor, and refuses what does not add up. Reads headers only."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from dsv4.config import ModelConfig
from dsv4.errors import CheckpointError
from dsv4.model.params import Param, block_params, each_declared
from dsv4.quant.formats import FP8_TILE, MX_BLOCK, NV_BLOCK, Format, QuantTensor
from dsv4.weights.names import fused_name, has_weight_suffix, hf_name, resaved_name
from dsv4.weights.reader import DTYPES, Entry, Reader

if TYPE_CHECKING:
    from torch import Tensor

# Calibration constants of activations: never part of a weight, known and passed over.
_CALIBRATION = ("input_scale", "input_global_scale")
# Not used: copies of the trunk's embedding and head that converted files put beside the draft block, and the
# router's bias for image tokens.
_UNUSED = re.compile(r"mtp\.\d+\.(embed\..*|emb\..*|head\.weight)|.*\.ffn\.gate\.bias_vl")
_DRAFTS = re.compile(r"mtp\..*")
# Nobody looks for more: a config of a few kilobytes can ask for any number of them.
_MOST_MISSING = 100_000
# Rows and columns per scale.
_TILES: dict[Format | None, tuple[int, int]] = {
    Format.FP8: (FP8_TILE, FP8_TILE),
    Format.MXFP4: (1, MX_BLOCK),
    Format.NVFP4: (1, NV_BLOCK),
}


@dataclass(frozen=True)
class Source:
    """Where and how one parameter is stored, or a rank's share of it: `param` has the share's shape.

    Row offsets are nonzero inside fused expert tensors and in shares, `col` in shares of columns.
    """

    param: Param
    format: Format | None  # None: a plain tensor or table
    weight: Entry
    scale: Entry | None = None
    global_scale: Entry | None = None
    is_reciprocal: bool = False
    row: int = 0
    scale_row: int = 0
    col: int = 0
    calibration_bytes: int = 0  # stored beside the weight, never read

    @property
    def is_quantised(self) -> bool:
        return self.format is not None and not self.format.is_plain

    @property
    def tile(self) -> tuple[int, int]:
        """Rows and columns that have one scale."""
        return _TILES.get(self.format, (1, 1))

    @property
    def num_bytes(self) -> int:
        """Stored bytes of this parameter, or share, with its companions."""
        *rows, cols = self.param.shape
        codes = DTYPES[self.weight.dtype][0] * math.prod(rows) * (cols // self.codes_per_byte)
        if self.scale is not None:
            tiles = -(-rows[0] // self.tile[0]) * -(-cols // self.tile[1])
            codes += DTYPES[self.scale.dtype][0] * tiles
        codes += self.global_scale.num_bytes if self.global_scale else 0
        return codes + self.calibration_bytes

    @property
    def codes_per_byte(self) -> int:
        return 2 if self.format in (Format.MXFP4, Format.NVFP4) else 1

    def shard(self, rank: int, size: int) -> "Source":
        """A rank's share. Scales are never cut: sizes that would need it are refused."""
        param = self.param
        if size == 1 or param.shard == "whole":
            return self
        first, stop = param.span(rank, size)
        by_rows = param.shard == "rows"
        unit = self.tile[0 if by_rows else 1]
        if (stop - first) % unit:
            whole = param.shape[0 if by_rows else 1]
            raise CheckpointError(
                f"{self.weight.name}: {whole} {param.shard} over {size} ranks make {stop - first} each, but "
                f"{self.format} shares a scale among {unit}; use fewer ranks, or convert the weight"
            )
        share = replace(param, shape=param.local_shape(size))
        if by_rows:
            return replace(
                self, param=share, row=self.row + first, scale_row=self.scale_row + first // self.tile[0]
            )
        return replace(self, param=share, col=first)

    def read_rows(self, reader: Reader, start: int, stop: int) -> QuantTensor:
        """Rows [start, stop) as stored; for FP8, start must lie on a tile."""
        assert self.format is not None
        cols = self.param.shape[1]
        shape = (stop - start, cols)
        place, width = self.col // self.codes_per_byte, cols // self.codes_per_byte
        data = reader.read(self.weight.name, self.row + start, self.row + stop, place, place + width)
        if self.scale is None:
            return QuantTensor(self.format, data, shape)
        high, wide = self.tile
        assert start % high == 0
        first, last = self.scale_row + start // high, self.scale_row - (-stop // high)
        place = self.col // wide
        scale = reader.read(self.scale.name, first, last, place, place - (-cols // wide))
        if DTYPES[self.scale.dtype][1] == "bfloat16":
            scale = scale.float()
        return QuantTensor(self.format, data, shape, scale, self.read_global_scale(reader))

    def read_global_scale(self, reader: Reader) -> float:
        if self.global_scale is None:
            return 1.0
        return self.global_value(float(reader.read(self.global_scale.name).flatten()[0]))

    def global_value(self, stored: float) -> float:
        if self.is_reciprocal:
            return 1.0 / stored if stored else math.inf  # refused as a scale that is no number
        return stored

    def read_plain(self, reader: Reader) -> "Tensor":
        rows = self.param.shape[0]
        return reader.read(self.weight.name, self.row, self.row + rows).reshape(self.param.shape)


def storage_name(source: Source) -> str:
    """How the parameter lies on disk, e.g. `nvfp4`, `fp8`, `bf16`; FP8 scales that are not E8M0 are named."""
    if source.format is None or source.format.is_plain:
        return source.weight.dtype.lower()
    if source.scale is not None and source.format == "fp8" and source.scale.dtype != "F8_E8M0":
        return f"fp8 ({source.scale.dtype.lower()} scales)"
    return str(source.format)


@dataclass(frozen=True)
class Inventory:
    """What a checkpoint holds for a model: one source per parameter, and notes on what is passed over."""

    sources: tuple[Source, ...]
    num_mtp_layers: int  # MTP blocks, or DSpark stages
    notes: tuple[str, ...]
    family: str
    elsewhere: tuple[Source, ...] = ()  # experts that only other ranks have

    @property
    def num_bytes(self) -> int:
        return sum(source.num_bytes for source in self.sources)

    @property
    def quantised(self) -> frozenset[str]:
        """The weights that are stored in 8 or 4 bits, on whichever rank."""
        return frozenset(s.param.name for s in (*self.sources, *self.elsewhere) if s.is_quantised)

    @property
    def experts(self) -> range:
        """Of every layer's routed experts those that are here."""
        here = {source.param.expert for source in self.sources if source.param.expert is not None}
        return range(min(here), max(here) + 1) if here else range(0)

    def without_drafts(self) -> "Inventory":
        """The trunk alone."""
        trunk = tuple(source for source in self.sources if source.param.component != "mtp")
        return replace(self, sources=trunk, num_mtp_layers=0)

    def shard(self, rank: int, size: int, own: range | None = None) -> "Inventory":
        """A rank's shares; with `own`, those routed experts whole, and no other."""
        if own is None:
            return replace(self, sources=tuple(source.shard(rank, size) for source in self.sources))
        here: list[Source] = []
        elsewhere: list[Source] = []
        for source in self.sources:
            if source.param.expert is None:
                here.append(source.shard(rank, size))
            else:
                (here if source.param.expert in own else elsewhere).append(source)
        return replace(self, sources=tuple(here), elsewhere=tuple(elsewhere))


def read_headers(path: str | Path) -> tuple[ModelConfig, Reader, Inventory]:
    """Check the config and all headers of a model folder, or of one file of it. Does not import torch."""
    path = Path(path)
    if path.is_file() and path.suffix != ".safetensors":
        raise CheckpointError(f"{path} is a file; give a model folder, or a .safetensors file in one")
    config = ModelConfig.load(path.parent if path.is_file() else path)
    reader = Reader(path)
    return config, reader, take_inventory(reader.entries, config)


def take_inventory(entries: Mapping[str, Entry], config: ModelConfig) -> Inventory:
    """Match stored tensors with the model's parameters; a missing, misshapen or left-over one is an error."""
    family = (
        "official" if "embed.weight" in entries else "hf" if "model.embed_tokens.weight" in entries else None
    )
    if family is None:
        raise CheckpointError(
            "found neither 'embed.weight' (official names) nor 'model.embed_tokens.weight' (Hugging Face "
            "names); give the folder of a DeepSeek-V4 checkpoint"
        )
    notes, skip = [], _UNUSED
    num_mtp = 0
    while f"mtp.{num_mtp}.attn_norm.weight" in entries:
        num_mtp += 1
    if config.dspark is None and any(name.startswith("mtp.0.main_proj.") for name in entries):
        num_mtp, skip = 0, _DRAFTS
        notes.append(
            "the DSpark draft stages (mtp.*) are not used: config.json does not describe them; "
            "copy the keys dspark_* from the original config.json to draft with them"
        )
    elif num_mtp == 0 and (config.num_mtp_layers or config.dspark):
        if draft := sorted(n for n in entries if n.startswith("mtp.") and not skip.fullmatch(n)):
            raise CheckpointError(
                f"mtp.0.attn_norm.weight is missing, but {draft[0]!r} and {len(draft) - 1} more mtp tensors "
                "are there; the draft block is incomplete: download the checkpoint again"
            )
        notes.append("the checkpoint holds no draft block (mtp.*), although its config announces one")
    elif config.dspark is None and num_mtp != config.num_mtp_layers:
        notes.append(f"draft blocks: {num_mtp} in the weights, {config.num_mtp_layers} in config.json")

    used: set[str] = set()
    finder = Finder(entries, used, config.num_experts)
    sources, missing = [], []
    for param in each_declared(config, num_mtp):
        source = finder.find(param)
        if source is None:
            missing.append(param)
            if len(missing) == _MOST_MISSING:
                break
        else:
            sources.append(source)
    if missing:
        more = " or more" if len(missing) == _MOST_MISSING else ""
        raise CheckpointError(
            f"{len(missing)}{more} tensors are missing, the first is {_stored_name(missing[0], family)!r} "
            f"{list(missing[0].shape)}; the checkpoint is incomplete (download it again) or its config.json "
            "is of another model"
        )
    unused = sorted(entries.keys() - used)
    left = [name for name in unused if not skip.fullmatch(name)]
    if skip is _UNUSED and unused and not left:
        more = f" and {len(unused) - 1} more" if unused[1:] else ""
        notes.append(f"not used: {unused[0]}{more}")
    if left:
        raise CheckpointError(
            f"{len(left)} tensors belong to no parameter of this model, the first is {left[0]!r} "
            f"{entries[left[0]].dtype} {list(entries[left[0]].shape)} in {entries[left[0]].file.name}; "
            "config.json is of another model, or the tensor must be removed"
        )
    return Inventory(tuple(sources), num_mtp, tuple(notes), family)


def storage_of(entries: Mapping[str, Entry], config: ModelConfig) -> str:
    """How the first layer's routed experts and attention are stored, e.g. "mxfp4, fp8"."""
    finder = Finder(entries, set(), config.num_experts)
    wanted = ("layers.0.ffn.experts.0.w1", "layers.0.attn.wq_a")
    params = [p for p in block_params(config, "layers.0", config.layers[0]) if p.name in wanted]
    found = [source for param in reversed(params) if (source := finder.find(param)) is not None]
    return ", ".join(dict.fromkeys(str(source.format) for source in found))


def _stored_name(param: Param, family: str) -> str:
    name = (hf_name(param.name) if family == "hf" else None) or param.name
    return f"{name}.weight" if has_weight_suffix(param.name) else name


class Finder:
    def __init__(self, entries: Mapping[str, Entry], used: set[str], num_experts: int) -> None:
        self.entries, self.used, self.num_experts = entries, used, num_experts

    def take(self, name: str) -> Entry | None:
        entry = self.entries.get(name)
        if entry is not None:
            self.used.add(name)
        return entry

    def find(self, param: Param) -> Source | None:
        for rename in (str, hf_name, resaved_name):
            name = rename(param.name)
            if name is None:
                continue
            if param.kind in ("linear", "grouped"):
                source = self.linear(param, name)
            else:
                source = self.plain(param, f"{name}.weight" if has_weight_suffix(param.name) else name)
            if source is not None:
                return source
        return self.fused(param)

    def plain(self, param: Param, name: str) -> Source | None:
        entry = self.take(name)
        if entry is None:
            return None
        wanted = ("I64", "I32") if param.kind == "table" else ("BF16", "F32")
        if entry.dtype not in wanted:
            raise _wrong(entry, "dtype", entry.dtype, " or ".join(wanted))
        if entry.shape != param.shape:
            raise _wrong(entry, "shape", list(entry.shape), list(param.shape))
        return Source(param, None, entry)

    def linear(self, param: Param, name: str) -> Source | None:
        """The table of companions: which tensors lie beside the weight decides the format."""
        packed = self.take(f"{name}.weight_packed")
        weight = packed or self.take(f"{name}.weight")
        if weight is None:
            return None
        calibration = [entry for s in _CALIBRATION if (entry := self.take(f"{name}.{s}"))]
        scales = [e for s in ("scale", "weight_scale", "weight_scale_inv") if (e := self.take(f"{name}.{s}"))]
        global_scale = self.take(f"{name}.weight_scale_2")
        reciprocal = self.take(f"{name}.weight_global_scale")
        if len(scales) > 1 or (global_scale and reciprocal):
            names = [e.name for e in (*scales, global_scale, reciprocal) if e]
            raise CheckpointError(
                f"{weight.name} has competing scales {names}; expected one set: convert the checkpoint again"
            )
        scale = scales[0] if scales else None
        found = self.settle(param, param.shape, weight, scale, global_scale or reciprocal)
        calibration_bytes = sum(entry.num_bytes for entry in calibration)
        return replace(found, is_reciprocal=reciprocal is not None, calibration_bytes=calibration_bytes)

    def fused(self, param: Param) -> Source | None:
        """HF's [E, rows, K] expert tensors: one parameter is a span of rows of the flattened tensor."""
        place = fused_name(param.name)
        if place is None or param.expert is None:
            return None
        weight = self.take(place[0])
        if weight is None:
            return None
        scale = self.take(f"{place[0]}_scale_inv")
        rows = param.shape[0]
        parts = 2 if place[0].endswith("gate_up_proj") else 1
        shape = (self.num_experts, parts * rows, param.shape[1])
        found = self.settle(param, shape, weight, scale, None)
        row = (param.expert * parts + place[1]) * rows
        tile_rows = found.tile[0]
        if rows % tile_rows:
            raise _wrong(weight, "rows per expert", rows, f"a multiple of {tile_rows}, the scale's tile")
        return replace(found, row=row, scale_row=row // tile_rows)

    def settle(
        self,
        param: Param,
        shape: tuple[int, ...],
        weight: Entry,
        scale: Entry | None,
        global_scale: Entry | None,
    ) -> Source:
        """Check a stored linear of that logical shape (3 dimensions if experts are fused) and its scales."""
        *lead, rows, cols = shape
        format, scale_types = _format_of(weight, scale, global_scale)
        stored = cols // 2 if format in (Format.MXFP4, Format.NVFP4) else cols
        if weight.shape != (*lead, rows, stored):
            raise _wrong(weight, "shape", list(weight.shape), [*lead, rows, stored])
        if stored != cols and cols % 2:
            raise _wrong(weight, "number of columns", cols, "an even number, as 4-bit codes come in pairs")
        if param.is_embedding and not format.is_plain:
            raise _wrong(weight, "dtype", weight.dtype, "BF16 or F32")
        if scale is None:
            return Source(param, format, weight)
        tile_rows, tile_cols = _TILES[format]
        want = (*lead, -(-rows // tile_rows), -(-cols // tile_cols))
        if scale.shape != want:
            raise _wrong(
                scale, "shape", list(scale.shape), f"{list(want)} for {format} (linear, not swizzled)"
            )
        if scale.dtype not in scale_types:
            raise _wrong(scale, "dtype", scale.dtype, " or ".join(scale_types))
        if global_scale is not None and global_scale.shape not in ((), (1,)):
            raise _wrong(global_scale, "shape", list(global_scale.shape), "a scalar")
        if global_scale is not None and global_scale.dtype != "F32":
            raise _wrong(global_scale, "dtype", global_scale.dtype, "F32")
        return Source(param, format, weight, scale, global_scale)


def _format_of(
    weight: Entry, scale: Entry | None, global_scale: Entry | None
) -> tuple[Format, tuple[str, ...]]:
    """-> format, allowed dtypes of the scale."""
    if scale is None:
        if weight.dtype not in ("BF16", "F32") or global_scale is not None:
            raise CheckpointError(
                f"{weight.name} is {weight.dtype} without a block scale; expected BF16 or F32, or one of "
                ".scale, .weight_scale, .weight_scale_inv beside it: the checkpoint is incomplete"
            )
        return (Format.BF16 if weight.dtype == "BF16" else Format.F32), ()
    if weight.dtype == "F8_E4M3":
        if global_scale is not None:
            raise CheckpointError(
                f"{weight.name} is F8_E4M3 with {scale.name} and {global_scale.name}; expected one scale for "
                "8-bit weights: convert the checkpoint again"
            )
        return Format.FP8, ("F8_E8M0", "F32", "BF16")
    if weight.dtype not in ("U8", "I8"):
        raise _wrong(weight, "dtype", weight.dtype, "F8_E4M3, U8 or I8 (it has a block scale)")
    if global_scale is not None:
        return Format.NVFP4, ("F8_E4M3",)
    if scale.dtype == "F8_E4M3":
        raise CheckpointError(
            f"{weight.name} has E4M3 block scales (NVFP4) but no .weight_scale_2 or .weight_global_scale; "
            "its magnitude is unknown without it: the checkpoint is incomplete"
        )
    return Format.MXFP4, ("F8_E8M0", "U8")


def _wrong(entry: Entry, what: str, found: object, expected: object) -> CheckpointError:
    return CheckpointError(
        f"{entry.name}: {what} is {found}, expected {expected} (in {entry.file.name}); "
        "check that config.json belongs to these weights, or convert them again"
    )
