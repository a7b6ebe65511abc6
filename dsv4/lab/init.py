"""Makes a random checkpoint in any published format, for tests and benchmarks. Same seed, same files."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from dsv4.config import ModelConfig
from dsv4.errors import ConfigError
from dsv4.lab.byte_tokenizer import MIN_VOCABULARY, byte_tokenizer_json
from dsv4.lab.files import size
from dsv4.lab.styles import STYLES, Style, contents, format_in
from dsv4.model.params import Param
from dsv4.quant.codec import encode_weight
from dsv4.quant.formats import Format
from dsv4.weights.names import has_weight_suffix
from dsv4.weights.writer import write_checkpoint, write_text


def make(
    folder: Path, config: ModelConfig, format: str, seed: int, device: str = "cpu"
) -> Iterator[tuple[int, int]]:
    """Write config.json and the weights; yields (bytes done, bytes in all).

    Drawn and encoded on `device`: a GPU is faster, and draws other values.
    """
    if not 0 <= seed < 1 << 43:
        raise ConfigError(f"seed is {seed}, expected 0 to 2**43 - 1")
    config, params, tensors = contents(config, format)
    style = STYLES[format]
    total, done = sum(tensor.num_bytes for tensor in tensors), 0
    _claim(folder, total)
    values = (value.cpu() for value in _values(params, style, config, seed, device))
    for count in write_checkpoint(folder, tensors, values):
        done += count
        yield done, total
    if config.vocab_size >= MIN_VOCABULARY:
        write_text(folder / "tokenizer.json", byte_tokenizer_json(config.vocab_size))
    write_text(folder / "config.json", json.dumps(config.to_dict(), indent=1) + "\n")


def _claim(folder: Path, total: int) -> None:
    """Make the folder, or refuse: it must be new or empty, and its disk must hold what will be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise ConfigError(f"{folder} is not empty; give a new folder")
        free = shutil.disk_usage(folder).free
    except OSError as error:
        raise ConfigError(f"{folder} cannot be made: {error.strerror or error}; give a new folder") from None
    if total > free:
        raise ConfigError(f"{folder} needs {size(total)}, but {size(free)} of disk are free")


def _values(
    params: list[Param], style: Style, config: ModelConfig, seed: int, device: str
) -> Iterator[Tensor]:
    for index, param in enumerate(params):
        # A generator per tensor: the values do not depend on which other tensors are written.
        generator = torch.Generator(device).manual_seed((seed << 20) + index)
        if param.kind == "table":
            yield (
                torch.rand(config.vocab_size, config.num_experts, generator=generator, device=device)
                .argsort(1)[:, : config.experts_per_token]
                .contiguous()
            )
        elif param.kind == "plain":
            value = _plain(param, generator)
            yield value.to(torch.bfloat16) if has_weight_suffix(param.name) else value
        else:
            std = 1.0 if param.is_embedding else param.shape[1] ** -0.5
            weight = torch.randn(param.shape, generator=generator, device=device) * std
            yield from _stored(weight, format_in(param, style), style)


def _plain(param: Param, generator: torch.Generator) -> Tensor:
    noise = torch.randn(param.shape, generator=generator, device=generator.device)
    last = param.name.rsplit(".", 1)[-1]
    if last.endswith("_fn"):
        return noise * param.shape[1] ** -0.5
    if last.startswith("hc_"):
        return 0.5 * noise + (1.0 if last.endswith("scale") else 0.0)
    return noise * 0.1 + (1.0 if has_weight_suffix(param.name) else 0.0)


def _stored(weight: Tensor, format: Format, style: Style) -> Iterator[Tensor]:
    q = encode_weight(weight, format)
    yield q.data
    if format is Format.FP8 and style.has_float_scales:
        # Scales that are not powers of two, so that readers which assume they are get caught.
        assert q.scale is not None
        yield torch.exp2(q.scale.float() - 127) * 0.9
    elif q.scale is not None:
        yield q.scale
    if format is Format.NVFP4:
        ct = style.is_compressed
        yield torch.full((1,), 1 / q.global_scale) if ct else torch.tensor(q.global_scale)
        yield torch.full((1,), 2000.0) if ct else torch.tensor(1.0)
