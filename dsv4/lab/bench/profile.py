"""Where a decode step's time goes: kernels by launch and layer kind, and the gaps between them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dsv4.config import ModelConfig
from dsv4.lab.bench.decode import PROFILED, Session

# The launch that opens a hyper-connection: two per layer and one before the head.
SITE = "mhc open"
ENDS = "ends"  # head and sampling


@dataclass(frozen=True)
class Span:
    """One kernel as the profiler saw it, in microseconds."""

    name: str
    start: float
    end: float


@dataclass(frozen=True)
class Share:
    """Of one step: how many kernels, their microseconds, and those between the kernel before and each."""

    count: float
    busy_us: float
    gap_us: float

    def as_dict(self) -> dict[str, float]:
        return {name: round(value, 2) for name, value in vars(self).items()}


@dataclass(frozen=True)
class Profile:
    """`is_named`: each kernel was told by its launch; else there were more kernels than launches."""

    is_named: bool
    launches: dict[str, Share]
    kinds: dict[str, Share]
    by_both: dict[tuple[str, str], Share]

    @property
    def busy_us(self) -> float:
        return sum(share.busy_us for share in self.launches.values())

    @property
    def gap_us(self) -> float:
        return sum(share.gap_us for share in self.launches.values())

    def as_dict(self) -> dict[str, Any]:
        return {
            **{"busy_us": round(self.busy_us, 1), "gap_us": round(self.gap_us, 1)},
            "launches": {name: share.as_dict() for name, share in self.launches.items()},
            "kinds": {name: share.as_dict() for name, share in self.kinds.items()},
        }


def kinds_of(names: Sequence[str], config: ModelConfig) -> list[str]:
    """Of each launch of a step, the kind of the layer it belongs to."""
    total = list(names).count(SITE)
    assert total == 2 * config.num_layers + 1, f"{total} launches named {SITE!r}, {config.num_layers} layers"
    out, sites = [], 0
    for name in names:
        sites += name == SITE
        layer = (sites - 1) // 2
        out.append(config.layers[layer].kind if 0 <= layer < config.num_layers else ENDS)
    return out


def summarise(spans: Sequence[Span], names: Sequence[str], kinds: Sequence[str], steps: int) -> Profile:
    """Kernels of `steps` steps in the order of their starts. A gap counts to the kernel after it, and is
    negative where two overlap. Before a step's first kernel there is none: the host may have been late."""
    is_named = len(spans) == len(names) * steps
    keys = [*zip(names, kinds, strict=True)] * steps if is_named else [(s.name[:48], "all") for s in spans]
    sums: dict[tuple[str, str], list[float]] = {}
    for number, (key, span) in enumerate(zip(keys, spans, strict=True)):
        is_first = number % len(names) == 0 if is_named else number == 0
        total = sums.setdefault(key, [0.0, 0.0, 0.0])
        total[0] += 1
        total[1] += span.end - span.start
        total[2] += 0.0 if is_first else span.start - spans[number - 1].end
    by_both = {key: Share(*(value / steps for value in total)) for key, total in sums.items()}
    return Profile(is_named, _added(by_both, 0), _added(by_both, 1), by_both)


def _added(by_both: dict[tuple[str, str], Share], part: int) -> dict[str, Share]:
    """Summed over the other half of the key, the longest first."""
    out: dict[str, Share] = {}
    for key, share in by_both.items():
        before = out.get(key[part], Share(0, 0, 0))
        out[key[part]] = Share(
            *(before.count + share.count, before.busy_us + share.busy_us, before.gap_us + share.gap_us)
        )
    return dict(sorted(out.items(), key=lambda item: -item[1].busy_us - item[1].gap_us))


def profile(session: Session) -> Profile:
    """Some further steps under torch's profiler."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    names = [launch.name for launch in session.decoder.launches]
    with profiler(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(PROFILED):
            session.decoder.step()
        torch.cuda.synchronize()
    cuda = torch.autograd.DeviceType.CUDA
    events = [event for event in seen.events() if event.device_type == cuda]
    spans = [Span(event.name, event.time_range.start, event.time_range.end) for event in events]
    spans.sort(key=lambda span: span.start)
    return summarise(spans, names, kinds_of(names, session.config), PROFILED)
