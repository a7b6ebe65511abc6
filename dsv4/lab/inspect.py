"""What a checkpoint holds, from its headers alone: formats, bytes per component, bytes read per token."""

from collections import Counter
from dataclasses import dataclass
from typing import Any

from dsv4.config import ModelConfig
from dsv4.weights.detect import Inventory, Source, storage_name


@dataclass(frozen=True)
class Component:
    """`active_bytes`: what one decoded token reads of it at batch 1, without drafts."""

    name: str
    formats: dict[str, int]  # storage -> number of parameters (tensors with their scales)
    total_bytes: int
    active_bytes: int


def components(inventory: Inventory, config: ModelConfig) -> list[Component]:
    groups: dict[str, list[Source]] = {}
    for source in inventory.sources:
        groups.setdefault(source.param.component, []).append(source)
    out = []
    for name, sources in groups.items():
        total = sum(source.num_bytes for source in sources)
        formats = Counter(storage_name(source) for source in sources)
        active = round(total * active_share(name, config))
        out.append(Component(name, dict(formats.most_common()), total, active))
    return sorted(out, key=lambda component: -component.total_bytes)


def active_share(component: str, config: ModelConfig) -> float:
    """Which part of a component's bytes one decoded token reads."""
    if component == "routed experts":
        return config.experts_per_token / config.num_experts
    # One row of the embedding and of a hash table: negligible, counted as nothing.
    return 0.0 if component in ("embedding", "hash table", "mtp") else 1.0


def report(inventory: Inventory, config: ModelConfig) -> dict[str, Any]:
    """Everything as plain data, for `--json`."""
    parts = components(inventory, config)
    return {
        "config": config.to_dict(),
        "names": inventory.family,
        "num_parameters": len(inventory.sources),
        "num_mtp_layers": inventory.num_mtp_layers,
        "drafter": config.drafter(inventory.num_mtp_layers),
        "notes": list(inventory.notes),
        "components": [
            {"name": p.name, "formats": p.formats, "bytes": p.total_bytes, "active_bytes": p.active_bytes}
            for p in parts
        ],
        "bytes": sum(p.total_bytes for p in parts),
        "active_bytes_per_token": sum(p.active_bytes for p in parts),
        "tensors": {
            source.param.name: {
                "format": storage_name(source),
                "shape": list(source.param.shape),
                "bytes": source.num_bytes,
            }
            for source in inventory.sources
        },
    }
