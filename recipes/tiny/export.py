"""Writes a twin's weights as a dsv4 checkpoint, in any of the engine's number formats."""

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dsv4.model.params import Param, declare
from dsv4.quant.codec import encode_weight
from dsv4.quant.formats import NV_BLOCK, Format, QuantTensor
from dsv4.text.tokenizer import Tokenizer
from dsv4.weights.names import has_weight_suffix
from dsv4.weights.writer import SHARD_BYTES, Declared, write_checkpoint, write_text
from recipes.tiny.state import load_state
from recipes.tiny.train import model_config
from recipes.tiny.twin import Twin, is_large, official


def export(
    twin: Twin,
    folder: Path,
    large: Format,
    small: Format,
    quantization: dict[str, Any],
    shard_bytes: int = SHARD_BYTES,
) -> int:
    """`large`: format of the big linears; `small`: of embedding, head, router, compressors. -> bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    params = declare(twin.config, twin.config.num_mtp_layers)
    plan = [(param, *_layout(param, large, small)) for param in params]
    tensors = [tensor for _, declared, _ in plan for tensor in declared]

    def values() -> Iterator[Tensor]:
        for param, _, make in plan:
            yield from make(official(twin, param).detach().cpu())

    total = sum(write_checkpoint(folder, tensors, values(), shard_bytes))
    config = replace(twin.config, quantization=quantization)
    write_text(folder / "config.json", json.dumps(config.to_dict(), indent=1) + "\n")
    return total


# How it is sampled where a request does not say: below 1, since a small model's tail is noise.
SAMPLING = {"temperature": 0.5, "top_p": 0.9}
Make = Callable[[Tensor], list[Tensor]]


def _layout(param: Param, large: Format, small: Format) -> tuple[list[Declared], Make]:
    name, shape = param.name, param.shape
    stored = f"{name}.weight" if has_weight_suffix(name) else name
    if param.kind == "table":
        return [Declared(stored, "I64", shape)], lambda w: [w]
    if param.kind == "plain":
        if small is Format.BF16 and (has_weight_suffix(name) or name.endswith("_fn")):
            return [Declared(stored, "BF16", shape)], lambda w: [w.to(torch.bfloat16)]
        return [Declared(stored, "F32", shape)], lambda w: [w.float()]
    format = large if is_large(param) else small
    if format is Format.BF16:
        return [Declared(stored, "BF16", shape)], lambda w: [w.to(torch.bfloat16)]
    if format is Format.F32:
        return [Declared(stored, "F32", shape)], lambda w: [w.float()]
    assert format is Format.NVFP4, format
    declared = [
        Declared(stored, "U8", (shape[0], shape[1] // 2)),
        Declared(f"{name}.weight_scale", "F8_E4M3", (shape[0], shape[1] // NV_BLOCK)),
        Declared(f"{name}.weight_scale_2", "F32", ()),
    ]

    def make(w: Tensor) -> list[Tensor]:
        q: QuantTensor = encode_weight(w.float(), Format.NVFP4)
        assert q.scale is not None
        return [q.data, q.scale, torch.tensor(q.global_scale)]

    return declared, make


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, required=True, help="folder of the training run, with state-*.pt")
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--large", choices=("nvfp4", "bf16"), default="nvfp4", help="format of the large linears"
    )
    parser.add_argument("--shard-bytes", type=int, default=SHARD_BYTES)
    args = parser.parse_args()
    twin = Twin.make(model_config(Tokenizer.load(args.tokenizer).vocab_size))
    load_state(twin, args.run)
    quantization = {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}
    large = Format(args.large)
    export(
        twin, args.out, large, Format.BF16, quantization if large is Format.NVFP4 else {}, args.shard_bytes
    )
    write_text(args.out / "generation_config.json", json.dumps(SAMPLING) + "\n")
    (args.out / "tokenizer.json").write_bytes(args.tokenizer.read_bytes())


if __name__ == "__main__":
    main()
