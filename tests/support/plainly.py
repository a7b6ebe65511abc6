"""The straightforward load: one tensor after the other, read and held in the calling thread."""

import re
from dataclasses import replace

import torch
from torch import Tensor

from dsv4.config import ModelConfig
from dsv4.errors import CheckpointError
from dsv4.gpu.tiles import Bank, Tiled, empty, put, tile
from dsv4.model.bundle import Weights
from dsv4.ops.experts.placement import Placement
from dsv4.quant.codec import decode
from dsv4.quant.formats import FP8_TILE, Format, QuantTensor
from dsv4.weights.detect import Source
from dsv4.weights.load import BLOCK_BYTES, Checkpoint, check_finite, check_scales, recode
from dsv4.weights.reader import Reader
from dsv4.weights.tiled import tiled_format

_EXPERT = re.compile(r"(.*\.(?:shared_experts|experts))(?:\.(\d+))?\.(w[123])")
_PLACE = {"w1": ("w13", 0), "w3": ("w13", 1), "w2": ("w2", 0)}


def load(checkpoint: Checkpoint, dense: bool) -> Weights:
    tensors: dict[str, Tensor | QuantTensor] = {}
    with checkpoint.reader as reader:
        for source in checkpoint.inventory.sources:
            if checkpoint.is_recoded(source):
                held = recode(load_one(reader, source, False, "cpu", checkpoint.config))
                tensors[source.param.name] = decode(held).t().contiguous() if dense else held
            else:
                tensors[source.param.name] = load_one(reader, source, dense, "cpu", checkpoint.config)
    return Weights(tensors, checkpoint.inventory.quantised, checkpoint.inventory.num_mtp_layers)


def load_tiled(
    checkpoint: Checkpoint,
    device: str | torch.device,
    placement: Placement | None = None,
    drafts: Placement | None = None,
) -> Weights:
    """As Checkpoint.load, with Tiled for linears and one Bank per layer's experts.

    With `placement` each routed expert is written where it will lie, with `drafts` those of draft blocks;
    nothing is held twice.
    """
    tensors: dict[str, Tensor | QuantTensor | Tiled | Bank] = {}
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
    quantised = checkpoint.inventory.quantised
    return Weights(tensors, quantised, checkpoint.inventory.num_mtp_layers, placement, drafts=drafts)


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


def move(q: QuantTensor, device: str | torch.device) -> QuantTensor:
    scale = None if q.scale is None else q.scale.to(device)
    return QuantTensor(q.format, q.data.to(device), q.shape, scale, q.global_scale, q.rope_dim)
