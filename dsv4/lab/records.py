"""Speeds that were measured and kept: one JSON object per line, the last line that a benchmark prints."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsv4.config import ModelConfig, preset
from dsv4.errors import ConfigError

# Kept with the package: what `dsv4 bench decode --save` measured on GPUs that were at hand.
SHIPPED = Path(__file__).parent / "results"
PACKAGE = Path(__file__).parents[1]
PRESETS = ("flash", "pro", "tiny")
# What a decode step reads and launches follows from these, and from the formats. Of the experts only so many
# are read as a token chooses, however many there are.
_SIZES = (
    *("layers", "hidden_size", "vocab_size", "num_heads", "head_dim", "q_rank", "o_groups", "o_rank"),
    *("index_heads", "index_dim", "index_topk", "experts_per_token", "expert_width", "num_streams"),
)


@dataclass(frozen=True)
class Record:
    """`share`: of the read bandwidth measured in the same run, what decoding one sequence reached with all
    weights in GPU memory. `model`: a published one, or `of_folder`."""

    device_name: str
    model: str
    layout: str
    share: float
    where: str


def published(config: ModelConfig) -> str | None:
    """Which published model has these sizes."""

    def sizes(c: ModelConfig) -> list[Any]:
        return [getattr(c, name) for name in _SIZES]

    return next((name for name in PRESETS if sizes(preset(name)) == sizes(config)), None)


def of_folder(title: str) -> str:
    """A model that has no published one's sizes; its folder may still be called like one."""
    return f"the folder {title}"


def best(folder: Path, device_name: str, model: str, layout: str) -> Record | None:
    """Of the lines for this model on a GPU of that name the highest share: in this layout, else in another.

    Passed over: other benchmarks, several sequences, rounded activations, several GPUs.
    """
    found: list[Record] = []
    for path in sorted(folder.glob("*.jsonl")):
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path} cannot be read: {error}; give another folder of records") from None
        shown = path.relative_to(PACKAGE.parent) if path.is_relative_to(PACKAGE) else path
        for number, line in enumerate(lines, 1):
            record = _record(line, f"{shown}:{number}") if line.strip() else None
            if record and _same(record.device_name, device_name) and record.model == model:
                found.append(record)
    return max(found, key=lambda record: (record.layout == layout, record.share), default=None)


def _record(line: str, where: str) -> Record | None:
    try:
        raw = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where} is not JSON ({error}); remove the line") from None
    if not isinstance(raw, dict) or not {"device_name", "model", "layout", "share"} <= raw.keys():
        return None
    name, share = raw["device_name"], raw["share"]
    if not isinstance(name, str) or isinstance(share, bool) or not isinstance(share, int | float):
        raise ConfigError(
            f"{where}: device_name is {name!r} and share {share!r}, expected a name and a number"
        )
    if not 0 < share <= 1:
        raise ConfigError(f"{where}: share is {share}, expected more than 0 and at most 1")
    usual = {"bench": "decode", "batch": 1, "activations": "a16", "ranks": 1}
    if any(raw.get(key, value) != value for key, value in usual.items()):
        return None
    if raw.get("spill") is not None:
        # Its share counts the wait for host memory; what it reached with all experts resident stands beside.
        share = _resident_share(raw)
    is_folder = raw.get("is_synthetic") is False or "published" in raw
    model = raw.get("published") or (of_folder(raw["model"]) if is_folder else raw["model"])
    if share is None:
        return None
    return Record(device_name=name, model=model, layout=raw["layout"], share=float(share), where=where)


def _resident_share(raw: dict[str, Any]) -> float | None:
    reached, ceiling = raw["spill"].get("gpu_gb_per_second"), raw.get("ceiling_gb_per_second")
    return round(reached / ceiling, 4) if reached and ceiling else None


def _same(recorded: str, wanted: str) -> bool:
    """`NVIDIA H200` is an H200; `NVIDIA GeForce RTX 5090` an RTX 5090."""
    return f" {wanted.lower()} " in f" {recorded.lower()} "
