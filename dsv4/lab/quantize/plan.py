"""What a conversion will write, from headers alone: each parameter's target, units of work, shards."""

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from dsv4.errors import ConfigError
from dsv4.lab.inspect import storage_name
from dsv4.model.params import Param
from dsv4.quant.formats import FP8_TILE, Format
from dsv4.weights.detect import Source
from dsv4.weights.load import Checkpoint
from dsv4.weights.names import has_weight_suffix
from dsv4.weights.reader import DTYPES, Entry
from dsv4.weights.writer import SHARD_BYTES, Declared, declare_linear, header_bytes, shard_name

_CHOICES = {
    "format": ("nvfp4", "mxfp4", "fp8", "bf16"),
    "scope": ("experts", "linears", "all"),
    "recipe": ("auto", "cast", "requant"),
    "rest": ("keep", "official"),
}
_DEFAULT_SCOPE = {"nvfp4": "experts", "mxfp4": "experts", "fp8": "linears", "bf16": "all"}
# Linears of a block that the official release stores in FP8.
_OFFICIAL_FP8 = {f"attn.{name}" for name in ("wq_a", "wq_b", "wkv", "wo_a", "wo_b", "indexer.wq_b")}
_OFFICIAL_FP8 |= {"e_proj", "h_proj", "main_proj"}
# Activations are not calibrated here. As a static scale 1.0 is too large rather than too small, which NVFP4
# forgives over twelve powers of two; published builds without calibration carry the same.
_INPUT_SCALE = struct.pack("<f", 1.0)


@dataclass(frozen=True)
class Options:
    """What was asked for. `scope` None is the format's own: experts, or all that the format is meant for."""

    format: str
    scope: str | None = None
    recipe: str = "auto"
    rest: str = "keep"
    mtp: bool = False
    least_squares: bool = False
    shard_bytes: int = SHARD_BYTES

    def __post_init__(self) -> None:
        if self.scope is None and self.format in _DEFAULT_SCOPE:
            object.__setattr__(self, "scope", _DEFAULT_SCOPE[self.format])
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed:
                raise ConfigError(f"{name} is {getattr(self, name)!r}, expected one of {', '.join(allowed)}")
        if self.least_squares and (self.recipe == "cast" or self.format not in ("nvfp4", "mxfp4")):
            raise ConfigError(
                "the least-squares search chooses block scales while rounding to nvfp4 or mxfp4; "
                f"it has nothing to do with format {self.format} and recipe {self.recipe}: leave it out"
            )
        if self.shard_bytes < 1:
            raise ConfigError(f"a shard of {self.shard_bytes} bytes holds nothing; give at least 1")

    @property
    def target(self) -> Format:
        return Format(self.format)


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes of a source file, taken as they are."""

    entry: Entry
    start: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Inverse:
    """A float32 scalar whose reciprocal is stored."""

    entry: Entry


@dataclass(frozen=True, slots=True)
class Output:
    """One tensor to write; content None is computed."""

    declared: Declared
    content: Span | Inverse | bytes | None = None


@dataclass(frozen=True, slots=True)
class Item:
    """One parameter: what it was, what it becomes."""

    name: str
    component: str
    stored: str
    target: str
    source_bytes: int
    outputs: tuple[Output, ...]
    source: Source | None = None  # None: a tensor outside the model, copied
    format: Format | None = None  # None: kept as stored

    @property
    def num_bytes(self) -> int:
        return sum(output.declared.num_bytes for output in self.outputs)


@dataclass(frozen=True, slots=True)
class Unit:
    """Parameters that are converted together: w1 and w3 of an expert share NVFP4's global scale."""

    items: tuple[Item, ...]
    how: Literal["keep", "cast", "round"]

    @property
    def source_bytes(self) -> int:
        return sum(item.source_bytes for item in self.items)

    @property
    def num_bytes(self) -> int:
        return sum(item.num_bytes for item in self.items)


@dataclass(frozen=True)
class Shard:
    """One file: its units in order, its header, and where each tensor starts in the file."""

    name: str
    units: tuple[Unit, ...]

    @property
    def tensors(self) -> Iterator[Declared]:
        return (output.declared for unit in self.units for item in unit.items for output in item.outputs)

    @property
    def header(self) -> bytes:
        return header_bytes(self.tensors)

    @property
    def source_bytes(self) -> int:
        return sum(unit.source_bytes for unit in self.units)

    @property
    def num_bytes(self) -> int:
        """Of the file, its header included."""
        return len(self.header) + sum(unit.num_bytes for unit in self.units)

    def offsets(self, header_size: int) -> dict[str, int]:
        out, position = {}, header_size
        for tensor in self.tensors:
            out[tensor.name] = position
            position += tensor.num_bytes
        return out


@dataclass(frozen=True)
class Plan:
    options: Options
    shards: tuple[Shard, ...]
    notes: tuple[str, ...]

    @property
    def items(self) -> Iterator[Item]:
        return (item for shard in self.shards for unit in shard.units for item in unit.items)

    @property
    def num_bytes(self) -> int:
        return sum(item.num_bytes for item in self.items)


def official_format(param: Param) -> Format:
    """The format in which DeepSeek's own release stores a linear."""
    if ".ffn.experts." in param.name:
        return Format.MXFP4
    in_block = param.name.split(".", 2)[-1]
    is_fp8 = in_block in _OFFICIAL_FP8 or ".shared_experts." in param.name
    return Format.FP8 if is_fp8 else Format.BF16


def target_format(source: Source, options: Options) -> Format | None:
    """The format a parameter is to get; None leaves it as it is stored."""
    param = source.param
    if param.kind in ("plain", "table"):
        return None
    official = official_format(param)
    is_in_scope = {
        "experts": official is Format.MXFP4,
        "linears": official is not Format.BF16,
        # Rounding the router or an embedding saves nothing and moves every token.
        "all": options.target is Format.BF16 or not (param.is_embedding or param.name.endswith(".gate")),
    }[options.scope or ""]
    if is_in_scope and (param.component != "mtp" or options.mtp):
        # Asked for explicitly, even what is in the format already is rounded again, by this program's rules.
        is_again = options.recipe == "requant" and source.is_quantised
        return None if options.target is source.format and not is_again else options.target
    if options.rest == "official" and (source.is_quantised or official is not Format.BF16):
        return None if official is source.format and not _has_float_scales(source) else official
    return None


def _has_float_scales(source: Source) -> bool:
    """FP8 with scales that the official release does not use; vLLM would read them as E8M0."""
    return source.format is Format.FP8 and source.scale is not None and source.scale.dtype != "F8_E8M0"


def make_plan(checkpoint: Checkpoint, options: Options) -> Plan:
    entries = checkpoint.reader.entries
    units: list[Unit] = []
    for source in checkpoint.inventory.sources:
        target = target_format(source, options)
        if target is None:
            units.append(Unit((_kept(source, entries),), "keep"))
            continue
        item = _converted(source, target)
        previous = units[-1].items[-1] if units else None
        if target is Format.NVFP4 and previous and _are_fused(previous, item):
            units[-1] = _unit((previous, item), options)
        else:
            units.append(_unit((item,), options))
    extras = _extras(checkpoint)
    units += [Unit((item,), "keep") for item in extras]
    notes = [note for note in checkpoint.inventory.notes if not (extras and "DSpark" in note)]
    if options.rest == "keep" and options.format in ("nvfp4", "mxfp4") and any(map(_is_unusual, units)):
        notes.append(
            "some linears stay as they are where published checkpoints have FP8 with power-of-two scales or "
            "MXFP4 (draft experts), which other engines may rely on; --rest official converts them"
        )
    if unequal := _unequal_pairs(checkpoint, units):
        notes.append(
            f"{unequal} experts keep different global scales for w1 and w3, which engines that fuse the two "
            "misread; --recipe requant rounds them again with one"
        )
    if extras:
        notes.append(f"{len(extras)} tensors that are no part of the model (mtp.*) are copied as they are")
        if options.mtp and not checkpoint.inventory.num_mtp_layers:
            raise ConfigError(
                "the draft stages of this checkpoint are not in its config.json and are copied as they are; "
                "leave --mtp out"
            )
    return Plan(options, tuple(_shards(units, options.shard_bytes)), tuple(notes))


def _is_unusual(unit: Unit) -> bool:
    """Kept in another way than the official release stores it."""
    source = unit.items[0].source
    if unit.how != "keep" or source is None or source.format in (None, Format.NVFP4):
        return False
    official = official_format(source.param)
    return official is not Format.BF16 and (source.format is not official or _has_float_scales(source))


def _are_fused(first: Item, second: Item) -> bool:
    """w1 and w3 of one expert, which are declared one after the other."""
    is_pair = first.name.endswith(".w1") and second.name == first.name.removesuffix("w1") + "w3"
    return is_pair and first.format is second.format


def _unequal_pairs(checkpoint: Checkpoint, units: list[Unit]) -> int:
    """Among NVFP4 experts that are kept: how many do not have one global scale for w1 and w3."""
    kept = {
        unit.items[0].name: unit.items[0].source
        for unit in units
        if unit.how == "keep" and unit.items[0].stored == str(Format.NVFP4)
    }
    count = 0
    for name, w1 in kept.items():
        w3 = kept.get(name.removesuffix("w1") + "w3") if name.endswith(".w1") else None
        if w1 and w3:
            scales = [source.read_global_scale(checkpoint.reader) for source in (w1, w3)]
            count += scales[0] != scales[1]
    return count


def _unit(items: tuple[Item, ...], options: Options) -> Unit:
    formats = {item.source.format for item in items if item.source}
    is_cast = (
        formats == {Format.MXFP4} and items[0].format is Format.NVFP4 and options.recipe in ("auto", "cast")
    )
    return Unit(tuple(map(_with_codes, items)), "cast") if is_cast else Unit(items, "round")


def _with_codes(item: Item) -> Item:
    """A cast leaves the packed codes as they are."""
    weight, source = item.outputs[0].declared, item.source
    assert source is not None
    codes = Output(weight, _span(source.weight, source.row, weight))
    return replace(item, outputs=(codes, *item.outputs[1:]))


def _converted(source: Source, target: Format) -> Item:
    param = source.param
    rows, cols = param.shape
    if cols % 2 and target in (Format.MXFP4, Format.NVFP4):
        raise ConfigError(
            f"{param.name} has {cols} columns, but {target} stores them in pairs; use --format fp8 or bf16, "
            "or a smaller --scope"
        )
    outputs = [Output(tensor) for tensor in declare_linear(param.name, (rows, cols), target)]
    if target is Format.NVFP4:
        outputs[-1] = Output(outputs[-1].declared, _INPUT_SCALE)
    stored = storage_name(source)
    return Item(
        *(param.name, param.component, stored, str(target), source.num_bytes, tuple(outputs)),
        source=source,
        format=target,
    )


def _kept(source: Source, entries: Mapping[str, Entry]) -> Item:
    """The stored bytes under official names; reciprocal scales are the one thing that changes."""
    param, name = source.param, source.param.name
    stored = storage_name(source)
    if not source.is_quantised:
        declared = Declared(
            f"{name}.weight" if has_weight_suffix(name) else name, source.weight.dtype, param.shape
        )
        outputs = [Output(declared, _span(source.weight, source.row, declared))]
    else:
        assert source.format is not None and source.scale is not None
        rows, cols = param.shape
        weight, scale, *rest = declare_linear(name, (rows, cols), source.format)
        if _has_float_scales(source):
            scale = Declared(scale.name, source.scale.dtype, scale.shape)
        outputs = [
            Output(weight, _span(source.weight, source.row, weight)),
            Output(scale, _span(source.scale, source.scale_row, scale)),
        ]
        if rest:
            assert source.global_scale is not None
            base = source.weight.name.rsplit(".", 1)[0]
            outputs.append(Output(rest[0], _scalar(source.global_scale, source.is_reciprocal)))
            if found := entries.get(f"{base}.input_scale"):
                outputs.append(Output(rest[1], _scalar(found, is_reciprocal=False)))
            elif found := entries.get(f"{base}.input_global_scale"):
                outputs.append(Output(rest[1], _scalar(found, is_reciprocal=True)))
            else:
                outputs.append(Output(rest[1], _INPUT_SCALE))
    return Item(name, param.component, stored, stored, source.num_bytes, tuple(outputs), source)


def _scalar(entry: Entry, is_reciprocal: bool) -> Span | Inverse:
    return Inverse(entry) if is_reciprocal else Span(entry, entry.start, entry.num_bytes)


def _span(entry: Entry, row: int, declared: Declared) -> Span:
    """The rows of a stored tensor that make up the declared one."""
    assert DTYPES[entry.dtype][0] == DTYPES[declared.dtype][0]
    row_bytes = entry.shape[-1] * DTYPES[entry.dtype][0] if entry.shape else 0
    return Span(entry, entry.start + row * row_bytes, declared.num_bytes)


def _extras(checkpoint: Checkpoint) -> list[Item]:
    """Stored tensors that no parameter uses: copies, and stages that config.json leaves out."""
    used = set()
    for source in checkpoint.inventory.sources:
        base = source.weight.name.rsplit(".", 1)[0]
        used |= {entry.name for entry in (source.weight, source.scale, source.global_scale) if entry}
        used |= {f"{base}.input_scale", f"{base}.input_global_scale"}
    out = []
    for name, entry in checkpoint.reader.entries.items():
        if name not in used:
            declared = Declared(name, entry.dtype, entry.shape)
            kind = entry.dtype.lower()
            output = Output(declared, Span(entry, entry.start, entry.num_bytes))
            out.append(Item(name, "mtp", kind, kind, entry.num_bytes, (output,)))
    return out


def _shards(units: list[Unit], limit: int) -> Iterator[Shard]:
    """Cut where a shard would exceed the limit. A unit stays whole, so a shard can be made by itself."""
    groups: list[list[Unit]] = [[]]
    size = 0
    for unit in units:
        if groups[-1] and size + unit.num_bytes > limit:
            groups.append([])
            size = 0
        groups[-1].append(unit)
        size += unit.num_bytes
    for number, group in enumerate(groups, 1):
        yield Shard(shard_name(number, len(groups)), tuple(group))


def row_chunks(rows: int) -> Iterator[tuple[int, int]]:
    """Row ranges that are converted at a time: one tile high, so that no scale is shared by two of them."""
    return ((start, min(rows, start + FP8_TILE)) for start in range(0, rows, FP8_TILE))
