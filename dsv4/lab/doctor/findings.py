"""What an examination found: one line each, and what to do about it."""

from dataclasses import asdict, dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class Finding:
    """`note`: nothing is wrong, but something could not be examined or is worth knowing."""

    area: str
    name: str
    level: Literal["ok", "note", "fail"]
    text: str
    remedy: str = ""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def passed(findings: list[Finding]) -> bool:
    return not any(finding.level == "fail" for finding in findings)
