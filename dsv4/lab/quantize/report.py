"""What a conversion did, in numbers: per tensor, per component, over depth. Plain data, no drawing."""

import math
from collections.abc import Iterable
from dataclasses import asdict, fields
from typing import Any

from dsv4.lab.quantize.plan import Item, Plan
from dsv4.quant.bulk import Tally

# A parameter, what became of it (kept: the stored bytes; exact: re-expressed without loss; rounded: not all),
# and its errors.
Result = tuple[Item, str, Tally]


def record(item: Item, tally: Tally | None) -> list[Any]:
    """A parameter's result as it is kept with its shard."""
    if item.format is None:
        shape = item.source.param.shape if item.source else item.outputs[0].declared.shape
        return [item.name, "kept", asdict(Tally(values=math.prod(shape)))]
    assert tally is not None
    return [item.name, "rounded" if tally.inexact else "exact", asdict(tally)]


def make_report(plan: Plan, records: Iterable[list[Any]], source: str) -> dict[str, Any]:
    """Everything about the conversion; the same for an interrupted run as for an undisturbed one."""
    found = {name: (how, Tally(**tally)) for name, how, tally in records}
    results = [(item, *found[item.name]) for item in plan.items]
    exponents = [sum(count) for count in zip(*(tally.exponents for _, _, tally in results), strict=True)]
    return {
        "source": source,
        "options": {field.name: getattr(plan.options, field.name) for field in fields(plan.options)},
        "shards": len(plan.shards),
        "bytes_before": sum(item.source_bytes for item, _, _ in results),
        "bytes_after": sum(item.num_bytes for item, _, _ in results),
        "components": _components(results),
        "depth": _depth(results),
        "scale_exponents": exponents if any(exponents) else None,
        "notes": list(plan.notes),
        "tensors": {
            item.name: {
                "from": item.stored,
                "to": item.target,
                "how": how,
                "bytes": item.num_bytes,
                **_quality(tally, how),
            }
            for item, how, tally in results
        },
    }


def _quality(tally: Tally, how: str) -> dict[str, float]:
    if how != "rounded":
        return {"relative_error": 0.0, "cosine": 1.0, "exact_share": 1.0}
    return {
        "relative_error": _short(tally.relative_error),
        "cosine": _short(tally.cosine, 9),
        "exact_share": _short(1 - tally.inexact / tally.values),
    }


def _short(value: float, digits: int = 6) -> float:
    return float(f"{value:.{digits}g}")


def _components(results: list[Result]) -> list[dict[str, Any]]:
    """One row per component and kind of conversion, the largest first; what is kept is one row each."""
    rows: dict[tuple[str, str, str, str], dict[str, Any]] = {}
    tallies: dict[tuple[str, str, str, str], Tally] = {}
    for item, how, tally in results:
        before, after = ("", "") if how == "kept" else (item.stored, item.target)
        key = (item.component, before, after, how)
        row = rows.setdefault(
            key,
            {
                **{"component": key[0], "from": key[1], "to": key[2], "how": key[3]},
                **{"tensors": 0, "bytes_before": 0, "bytes_after": 0},
            },
        )
        row["tensors"] += 1
        row["bytes_before"] += item.source_bytes
        row["bytes_after"] += item.num_bytes
        tallies.setdefault(key, Tally()).add(tally)
    for key, row in rows.items():
        row["values"] = tallies[key].values
        row |= _quality(tallies[key], row["how"])
    return sorted(rows.values(), key=lambda row: (-row["bytes_after"], row["component"], row["how"]))


def _depth(results: list[Result]) -> list[dict[str, Any]]:
    """Relative errors of what was rounded, per layer and kind of linear."""
    groups: dict[tuple[str, int], list[Tally]] = {}
    for item, how, tally in results:
        if how == "rounded" and item.name.startswith("layers."):
            kind = item.component
            if kind == "routed experts":
                kind += f" {item.name.rsplit('.', 1)[-1]}"
            groups.setdefault((kind, int(item.name.split(".")[1])), []).append(tally)
    out = []
    for (kind, layer), members in sorted(groups.items()):
        total = Tally()
        for tally in members:
            total.add(tally)
        errors = [tally.relative_error for tally in members]
        out.append(
            {
                **{"kind": kind, "layer": layer, "tensors": len(members)},
                **{"relative_error": _short(total.relative_error)},
                **{"lowest": _short(min(errors)), "highest": _short(max(errors))},
            }
        )
    return out
