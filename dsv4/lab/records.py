"""Speeds that were measured and kept: one JSON object per line, the last line that a benchmark prints."""

import json
from dataclasses import dataclass
from pathlib import Path

from dsv4.errors import ConfigError

# Kept with the package: what `dsv4 bench decode --save` measured on GPUs that were at hand.
SHIPPED = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Record:
    """`share`: of the read bandwidth measured in the same run, what decoding reached."""

    device_name: str
    share: float
    where: str


def best(folder: Path, device_name: str) -> Record | None:
    """The highest share recorded for a GPU of that name, or None. Lines without a share are passed over."""
    found: list[Record] = []
    for path in sorted(folder.glob("*.jsonl")):
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path} cannot be read: {error}; give another folder of records") from None
        for number, line in enumerate(lines, 1):
            where = f"{path}:{number}"
            record = _record(line, where) if line.strip() else None
            if record and _same(record.device_name, device_name):
                found.append(record)
    return max(found, key=lambda record: record.share, default=None)


def _record(line: str, where: str) -> Record | None:
    try:
        raw = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where} is not JSON ({error}); remove the line") from None
    if not isinstance(raw, dict) or not {"device_name", "share"} <= raw.keys():
        return None
    name, share = raw["device_name"], raw["share"]
    if not isinstance(name, str) or isinstance(share, bool) or not isinstance(share, int | float):
        raise ConfigError(
            f"{where}: device_name is {name!r} and share {share!r}, expected a name and a number"
        )
    if not 0 < share <= 1:
        raise ConfigError(f"{where}: share is {share}, expected more than 0 and at most 1")
    return Record(name, float(share), where)


def _same(recorded: str, wanted: str) -> bool:
    """`NVIDIA H200` is an H200; `NVIDIA GeForce RTX 5090` an RTX 5090."""
    return f" {wanted.lower()} " in f" {recorded.lower()} "
