"""Random weights of a model made directly in the GPU's tiles: to measure speed without a checkpoint."""

import math
from dataclasses import replace

import torch
from torch import Tensor

from dsv4.config import Dspark, ModelConfig
from dsv4.gpu.tiles import Bank, Tiled, empty
from dsv4.lab.styles import format_of
from dsv4.model.bundle import Weights
from dsv4.model.params import Param, declare
from dsv4.ops.experts.placement import Placement, bank
from dsv4.quant.formats import Format, QuantTensor


def with_experts(config: ModelConfig, experts: int) -> ModelConfig:
    """The model with that many experts resident: a token reads the same bytes, the whole takes less."""
    return replace(config, num_experts=experts)


def with_stages(config: ModelConfig) -> ModelConfig:
    """The model with DSpark's stages as published ones have them; they tap its last three layers."""
    last, is_pro = config.num_layers, config.hidden_size >= 7168
    dspark = Dspark(5, config.vocab_size - 1, tuple(range(max(0, last - 3), last)), 512 if is_pro else 256)
    return replace(config, dspark=dspark, num_mtp_layers=3)


def num_stages(config: ModelConfig) -> int:
    """Count the draft stages of a synthetic model, which has no MTP block."""
    return config.num_mtp_layers if config.dspark else 0


def make_weights(
    config: ModelConfig,
    layout: str,
    device: str,
    seed: int = 0,
    placement: Placement | None = None,
    ranks: int = 1,
    whole_experts: bool = False,
    draft_blocks: int = 0,
) -> Weights:
    """Plausible values: products keep the size of their inputs. `draft_blocks`: MTP's, or DSpark's stages.

    With `placement` routed experts are made where it has them. `ranks`: the share of one of so many, as if
    its neighbours' were like it; `whole_experts`: it has some of the routed experts, in all their width.
    """
    generator = torch.Generator(device).manual_seed(seed)
    tensors: dict[str, Tensor | QuantTensor | Tiled | Bank] = {}
    quantised = set()
    for param in declare(config, draft_blocks):
        local = param.local_shape(ranks)
        if param.expert is not None or ".shared_experts." in param.name:
            name = param.name.rsplit(".", 2 if param.expert is not None else 1)[0]
            if placement is not None and name in placement.names:
                if name not in tensors:
                    tensors[name] = placement.bank(name)
                    _fill_placed(placement, name, generator)
            elif name not in tensors:
                sharing = param.shared_by(ranks, whole_experts)
                count = config.num_experts * sharing // ranks if param.expert is not None else 1
                width, hidden = config.expert_width // sharing, config.hidden_size
                format = format_of(param, layout)
                tensors[name] = Bank(
                    _random(format, (width, hidden), count, 2, device, generator),
                    _random(format, (hidden, width), count, 1, device, generator),
                )
            quantised.add(param.name)
        elif param.kind == "table":
            tensors[param.name] = torch.randint(
                0, config.num_experts, local, device=device, generator=generator
            )
        elif param.kind == "plain":
            tensors[param.name] = _plain(param, local, device, generator)
        elif param.stays_in_rows:
            data = torch.randn(local, device=device, dtype=torch.bfloat16, generator=generator)
            data *= 1.0 if param.is_embedding else param.shape[1] ** -0.5
            tensors[param.name] = QuantTensor(Format.BF16, data, (local[0], local[1]))
        else:
            shape, format = (local[0], local[1]), format_of(param, layout)
            tensors[param.name] = _random(format, shape, 1, 1, device, generator)
            if not format.is_plain:
                quantised.add(param.name)
    return Weights(tensors, frozenset(quantised), draft_blocks, placement)


def _plain(param: Param, shape: tuple[int, ...], device: str, generator: torch.Generator) -> Tensor:
    noise = torch.randn(shape, device=device, generator=generator)
    if param.name.endswith("_fn"):
        return noise * param.shape[1] ** -0.5
    if param.name.endswith(("norm", "_scale")):
        return 1 + 0.1 * noise
    return 0.1 * noise


def _random(
    format: Format, shape: tuple[int, int], count: int, halves: int, device: str, generator: torch.Generator
) -> Tiled:
    out = empty(format, shape, count, halves, device)
    _fill(out, generator)
    return out


def _fill_placed(placement: Placement, name: str, generator: torch.Generator) -> None:
    """Made on the device that has the generator, then copied to where the expert lies."""
    form, device = placement.form, generator.device
    held = torch.empty(1, form.num_bytes, dtype=torch.uint8, device=device)
    made = bank(form, held, torch.empty(1, 2, device=device), torch.empty(1, 1, device=device))
    for expert in range(placement.num_experts):
        at = placement.expert(name, expert)
        for part, to in ((made.w13, at.w13), (made.w2, at.w2)):
            _fill(part, generator)
            to.factor.copy_(part.factor)
            to.data.copy_(part.data)
            to.scale.copy_(part.scale)


def _fill(out: Tiled, generator: torch.Generator) -> None:
    """Random codes; the factor makes a row of K weights have the length of one."""
    format, want = out.format, out.shape[1] ** -0.5
    if format is Format.BF16:
        out.data.view(torch.bfloat16).normal_(0, want, generator=generator)
        out.factor.fill_(1.0)
        return
    for part in out.data.view(out.count, -1):  # one at a time: random_ of 100 GB needs no second copy
        part.random_(0, 256, generator=generator)
    if format is Format.FP8:
        out.data.bitwise_and_(0b10111111)  # below 2, so never NaN
        out.scale.view(torch.float32).fill_(1.0)
        rms = 0.57
    else:
        # E4M3 codes from 0.5 to 2, or powers of two around 1.
        low, high = (0x30, 0x40) if format is Format.NVFP4 else (126, 129)
        out.scale.random_(low, high, generator=generator)
        rms = math.sqrt(7.4) * 1.1
    out.factor.fill_(want / rms)
