"""Speeds that were measured and kept: lines of `dsv4 bench decode`, and steps of one rank of several."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsv4.config import ModelConfig, preset
from dsv4.errors import ConfigError

# Kept with the package: what `dsv4 bench decode --save` measured on GPUs that were at hand.
SHIPPED = Path(__file__).parent / "results"
PRESETS = ("flash", "pro", "tiny")
# What a decode step reads and launches follows from these, and from the formats. A token reads the experts it
# chooses, however many there are.
_SIZES = (
    *("layers", "hidden_size", "vocab_size", "num_heads", "head_dim", "q_rank", "o_groups", "o_rank"),
    *("index_heads", "index_dim", "index_topk", "experts_per_token", "expert_width", "num_streams"),
)
# (GPU, published model, layout) -> number of ranks that share every layer -> ms of one rank's decode step:
# one sequence at 4k, its own memory in its peers' place, with 64 of Flash's experts or all of Pro's; 16 and
# 18 November 2026, python -m bench.ranks (docs/kernels.md, "One rank of several").
_RANK_STEPS: dict[tuple[str, str, str], dict[int, float]] = {
    ("H200", "flash", "nvfp4"): {2: 2.845, 4: 2.403, 8: 2.180},
    ("H200", "pro", "nvfp4"): {8: 4.805},
}
ALL_REDUCE_US = 5.0  # assumed for each


@dataclass(frozen=True)
class Speed:
    """Tokens per second of one sequence. `kind`: measured or predicted. `how`: by what."""

    tokens_per_second: float
    kind: str
    how: str


def num_all_reduces(config: ModelConfig, ranks: int) -> int:
    """Of one step: after attention and after the experts of each layer, the embedding and the choice."""
    return 2 * config.num_layers + 2 if ranks > 1 else 0


def published(config: ModelConfig) -> str | None:
    """Which published model has these sizes."""

    def sizes(c: ModelConfig) -> list[Any]:
        return [getattr(c, name) for name in _SIZES]

    return next((name for name in PRESETS if sizes(preset(name)) == sizes(config)), None)


def of_folder(title: str) -> str:
    """A model that has no published one's sizes; its folder may still be called like one."""
    return f"the folder {title}"


def by_rank_step(config: ModelConfig, gpu: str, model: str, layout: str, ranks: int) -> Speed | None:
    """Several GPUs, never run: one rank's step as measured, and the latency of its all-reduces."""
    step_ms = _RANK_STEPS.get((gpu, model, layout), {}).get(ranks)
    if step_ms is None:
        return None
    count = num_all_reduces(config, ranks)
    rate = 1e3 / (step_ms + count * ALL_REDUCE_US / 1e3)
    waits = f"{count} all-reduces of {ALL_REDUCE_US:g} us"
    return Speed(rate, "predicted", f"one rank's step measured on one {gpu}, {step_ms} ms, and {waits}")


def best(folder: Path, gpu: str, model: str, layout: str, spills: bool = False) -> Speed | None:
    """The fastest line of one sequence for this model in this layout on one such GPU; `spills`: of those with
    experts in host memory, which are passed over otherwise.

    Passed over: other benchmarks, several sequences, rounded activations, several GPUs.
    """
    found: list[Speed] = []
    for path in sorted(folder.glob("*.jsonl")):
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path} cannot be read: {error}; give another folder of records") from None
        for number, line in enumerate(lines, 1):
            raw = _parsed(line, f"{path}:{number}") if line.strip() else None
            if raw and _same(raw["device_name"], gpu) and (_model(raw), raw["layout"]) == (model, layout):
                spill = raw.get("spill")
                if (spill is not None) == spills:
                    found.append(Speed(float(raw["tokens_per_second"]), "measured", _how(raw, spill)))
    return max(found, key=lambda speed: speed.tokens_per_second, default=None)


def _how(raw: dict[str, Any], spill: dict[str, Any] | None) -> str:
    at = f"bare steps at {raw['context'] // 1024}k" if raw.get("context", 0) >= 1024 else "bare steps"
    there = f", {spill['host_bytes'] / 1e9:.1f} GB of experts in host memory" if spill else ""
    law = f", {raw['routing']} routing" if raw.get("routing") else ""
    return f"{at}{there}{law}, {raw['date'][:10]}" if "date" in raw else f"{at}{there}{law}"


def _parsed(line: str, where: str) -> dict[str, Any] | None:
    """A line about decoding one sequence; None for others."""
    try:
        raw = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where} is not JSON ({error}); remove the line") from None
    if not isinstance(raw, dict) or not {"device_name", "model", "layout", "tokens_per_second"} <= raw.keys():
        return None
    name, rate = raw["device_name"], raw["tokens_per_second"]
    if not isinstance(name, str) or isinstance(rate, bool) or not isinstance(rate, int | float) or rate <= 0:
        raise ConfigError(
            f"{where}: device_name is {name!r} and tokens_per_second {rate!r}, expected a name and a number "
            "above 0; remove the line"
        )
    usual = {"bench": "decode", "batch": 1, "activations": "a16", "ranks": 1}
    return None if any(raw.get(key, value) != value for key, value in usual.items()) else raw


def _model(raw: dict[str, Any]) -> str:
    is_folder = raw.get("is_synthetic") is False or "published" in raw
    name: str = raw.get("published") or (of_folder(raw["model"]) if is_folder else raw["model"])
    return name


def _same(recorded: str, wanted: str) -> bool:
    """`NVIDIA H200` is an H200; `NVIDIA GeForce RTX 5090` an RTX 5090."""
    return f" {wanted.lower()} " in f" {recorded.lower()} "
