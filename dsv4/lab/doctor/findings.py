"""What an examination found: one line each, and what to do about it."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Finding:
    """`note`: nothing is wrong, but something could not be examined or is worth knowing."""

    area: str
    name: str
    level: Literal["ok", "note", "fail"]
    text: str
    remedy: str = ""


def first_of(problems: list[str]) -> str:
    """A finding names one, and says how many more there are."""
    more = f", and {len(problems) - 1} more" if len(problems) > 1 else ""
    return problems[0] + more


def passed(findings: list[Finding]) -> bool:
    return not any(finding.level == "fail" for finding in findings)
