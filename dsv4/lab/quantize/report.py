"""What a conversion did, in numbers: per tensor, per component, over depth. Plain data, no drawing."""

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from typing import Any

from dsv4.lab.quantize.plan import Item, Plan
from dsv4.quant.bulk import Tally


@dataclass(frozen=True)
class Outcome:
    """One parameter's result. kept: the stored bytes; exact: re-expressed without loss; rounded: not all."""

    name: str
    how: str
    tally: Tally

    @classmethod
    def of(cls, item: Item, tally: Tally | None) -> "Outcome":
        if item.format is None:
            shape = item.source.param.shape if item.source else item.outputs[0].declared.shape
            return cls(item.name, "kept", Tally(values=math.prod(shape)))
        assert tally is not None
        return cls(item.name, "rounded" if tally.inexact else "exact", tally)

    def as_list(self) -> list[Any]:
        return [self.name, self.how, asdict(self.tally)]

    @classmethod
    def from_list(cls, record: list[Any]) -> "Outcome":
        return cls(record[0], record[1], Tally(**record[2]))


def make_report(plan: Plan, records: Iterable[list[Any]], source: str) -> dict[str, Any]:
    """Everything about the conversion; the same for an interrupted run as for an undisturbed one."""
    outcomes = {outcome.name: outcome for outcome in map(Outcome.from_list, records)}
    pairs = [(item, outcomes[item.name]) for item in plan.items]
    exponents = [sum(count) for count in zip(*(o.tally.exponents for _, o in pairs), strict=True)]
    return {
        "source": source,
        "options": {field.name: getattr(plan.options, field.name) for field in fields(plan.options)},
        "shards": len(plan.shards),
        "bytes_before": sum(item.source_bytes for item, _ in pairs),
        "bytes_after": sum(item.num_bytes for item, _ in pairs),
        "components": _components(pairs),
        "depth": _depth(pairs),
        "scale_exponents": exponents if any(exponents) else None,
        "notes": list(plan.notes),
        "tensors": {
            item.name: {
                "from": item.stored,
                "to": item.target,
                "how": outcome.how,
                "bytes": item.num_bytes,
                **_quality(outcome.tally, outcome.how),
            }
            for item, outcome in pairs
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


def _components(pairs: list[tuple[Item, Outcome]]) -> list[dict[str, Any]]:
    """One row per component and kind of conversion, the largest first; what is kept is one row each."""
    rows: dict[tuple[str, str, str, str], dict[str, Any]] = {}
    tallies: dict[tuple[str, str, str, str], Tally] = {}
    for item, outcome in pairs:
        before, after = ("", "") if outcome.how == "kept" else (item.stored, item.target)
        key = (item.component, before, after, outcome.how)
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
        tallies.setdefault(key, Tally()).add(outcome.tally)
    for key, row in rows.items():
        row["values"] = tallies[key].values
        row |= _quality(tallies[key], row["how"])
    return sorted(rows.values(), key=lambda row: (-row["bytes_after"], row["component"], row["how"]))


def _depth(pairs: list[tuple[Item, Outcome]]) -> list[dict[str, Any]]:
    """Relative errors of what was rounded, per layer and kind of linear."""
    groups: dict[tuple[str, int], list[Outcome]] = {}
    for item, outcome in pairs:
        if outcome.how == "rounded" and item.name.startswith("layers."):
            kind = item.component
            if kind == "routed experts":
                kind += f" {item.name.rsplit('.', 1)[-1]}"
            groups.setdefault((kind, int(item.name.split(".")[1])), []).append(outcome)
    out = []
    for (kind, layer), members in sorted(groups.items()):
        total = Tally()
        for outcome in members:
            total.add(outcome.tally)
        errors = [outcome.tally.relative_error for outcome in members]
        out.append(
            {
                **{"kind": kind, "layer": layer, "tensors": len(members)},
                **{"relative_error": _short(total.relative_error)},
                **{"lowest": _short(min(errors)), "highest": _short(max(errors))},
            }
        )
    return out
