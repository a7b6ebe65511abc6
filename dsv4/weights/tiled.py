"""Loads a checkpoint in the GPU kernels' tiles: streamed weight by weight, experts into their bank."""

import re
from dataclasses import replace

import torch
from torch import Tensor

from dsv4.errors import CheckpointError
from dsv4.kernels.common.places import Placement
from dsv4.kernels.common.shapes import Form
from dsv4.kernels.common.tiles import Bank, Tiled, empty, put, tile
from dsv4.model.bundle import Weights
from dsv4.quant.codec import decode
from dsv4.quant.formats import Format, QuantTensor
from dsv4.weights.detect import Source
from dsv4.weights.load import (
    Checkpoint,
    Progress,
    check_finite,
    check_scales,
    load_one,
    move,
    recode,
)
from dsv4.weights.sizes import tiled_format, tiled_source_bytes

_EXPERT = re.compile(r"(.*\.(?:shared_experts|experts))(?:\.(\d+))?\.(w[123])")
# As halves of a pair, and the down projection.
_PLACE = {"w1": ("w13", 0), "w3": ("w13", 1), "w2": ("w2", 0)}


def load_tiled(
    checkpoint: Checkpoint,
    device: str | torch.device,
    progress: Progress | None = None,
    placement: Placement | None = None,
    drafts: Placement | None = None,
) -> Weights:
    """As Checkpoint.load, with Tiled for linears and one Bank per layer's experts.

    With `placement` each routed expert is written where it will lie, with `drafts` those of draft blocks;
    nothing is held twice.
    """
    tensors: dict[str, Tensor | QuantTensor | Tiled | Bank] = {}
    total, done = checkpoint.inventory.num_bytes, 0
    sources, own = checkpoint.inventory.sources, checkpoint.inventory.experts
    with checkpoint.reader as reader:
        for source in sources:
            name, kind = source.param.name, source.param.kind
            if kind in ("plain", "table") or name == "embed":
                tensors[name] = load_one(reader, source, False, device, checkpoint.config)
            else:
                held = move(
                    _stored(check_scales(source.read_rows(reader, 0, source.param.shape[0]), source), source),
                    device,
                )
                if checkpoint.is_recoded(source):
                    held = recode(held)
                if match := _EXPERT.fullmatch(name):
                    where = next((p for p in (placement, drafts) if p and match[1] in p.names), None)
                    _put_expert(
                        tensors=tensors,
                        match=match,
                        held=held,
                        source=source,
                        hidden=checkpoint.config.hidden_size,
                        own=own,
                        placement=where,
                    )
                else:
                    tensors[name] = tile(held)
            done += source.num_bytes
            if progress:
                progress(done, total)
    quantised = checkpoint.inventory.quantised
    return Weights(tensors, quantised, checkpoint.inventory.num_mtp_layers, placement, drafts=drafts)


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


def _stored(held: QuantTensor, source: Source) -> QuantTensor:
    """The weight in the format it is tiled in; what was checked at load on the CPU is checked here too."""
    if held.format.is_plain:
        check_finite(held.data, source)
    elif held.format is Format.FP8 and bool(((held.data.view(torch.uint8) & 127) == 127).any()):
        raise CheckpointError(
            f"{source.weight.name} in {source.weight.file.name} holds NaN; "
            "the checkpoint is damaged: download or convert it again"
        )
    format = tiled_format(source)
    if format is held.format:
        return held
    values = decode(held)
    rounded = values.to(torch.bfloat16)
    # The reference itself rounds a grouped FP8 weight to BF16.
    if held.format is Format.F32 and not torch.equal(rounded.float(), values):
        raise CheckpointError(
            f"{source.weight.name} is float32 and its values do not fit BF16, which the GPU kernels need; "
            "convert it (dsv4 quantize --format bf16) or use --device cpu"
        )
    return QuantTensor(Format.BF16, rounded, held.shape)


def _put_expert(
    tensors: dict[str, Tensor | QuantTensor | Tiled | Bank],
    match: re.Match[str],
    held: QuantTensor,
    source: Source,
    hidden: int,
    own: range,
    placement: Placement | None,
) -> None:
    """`own`: the routed experts of a bank."""
    name, number, which = match.groups()
    at, count = (int(number) - own.start, len(own)) if number is not None else (0, 1)
    part, half = _PLACE[which]
    bank = tensors.get(name)
    if placement is not None and bank is None:
        bank = tensors[name] = placement.bank(name)
    elif bank is None:
        device = held.data.device
        width = held.shape[1] if part == "w2" else held.shape[0]  # of this rank
        up = empty(held.format, (width, hidden), count, 2, device)
        down = empty(held.format, (hidden, width), count, 1, device)
        bank = tensors[name] = Bank(up, down)
    assert isinstance(bank, Bank)
    to = getattr(bank, part)
    if held.format is not to.format:
        raise CheckpointError(
            f"{source.weight.name} is {held.format} and other experts of the layer are {to.format}; the GPU "
            "kernels need one format per layer: convert the checkpoint, or use --device cpu"
        )
    if placement is not None:
        fits = put(getattr(placement.expert(name, at), part), 0, half, held)
    else:
        fits = put(to, at, half, held)
    tensors[name] = replace(bank, **{part: fits.of(to)})
