"""One hyper-connection site: streams in, one vector out, and back on the way into the next site."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dsv4.model.bundle import Bundle
from dsv4.model.step import Step


def wide_scale(scale: Tensor, num_streams: int) -> Tensor:
    """A value for each mix, of scales stored once for each kind: x, gate, comb. A head has the first only."""
    n = num_streams
    counts = (n, n, n * n)[: len(scale)]
    return scale.repeat_interleave(torch.tensor(counts, device=scale.device), output_size=sum(counts))


@dataclass
class Left:
    """Streams [T, N, D] and, of a site, what its block made and how that goes back into them.

    Whoever puts it back takes all of it, so that the old streams are freed when the new ones are there.
    """

    streams: Tensor | None
    y: Tensor | None = None  # [T, D]
    gate: Tensor | None = None
    comb: Tensor | None = None
    site: "HyperConnection | None" = None

    def take(self) -> dict[str, Any]:
        """As arguments of Ops.enter."""
        assert self.streams is not None, "what a site left is taken once"
        taken = {"y": self.y, "streams": self.streams, "gate": self.gate, "comb": self.comb}
        self.y = self.streams = self.gate = self.comb = None
        return taken

    def see(self, streams: Tensor, step: Step) -> None:
        if self.site is not None:
            step.see(self.site.name, "streams", streams)

    def close(self, step: Step) -> Tensor:
        """The streams after the last site."""
        y, streams, gate, comb = self.take().values()
        if y is not None:
            assert self.site is not None
            streams = self.site.ops.mhc.post(y, streams, gate, comb)
            self.see(streams, step)
        assert isinstance(streams, Tensor)
        return streams


class HyperConnection:
    def __init__(self, b: Bundle, name: str) -> None:
        self.ops, self.config, self.name = b.ops, b.config, name
        self.fn = b.plain(f"{name}_fn").t().contiguous()  # [N*D, mixes]
        self.base = b.plain(f"{name}_base")
        self.scale = wide_scale(b.plain(f"{name}_scale"), b.config.num_streams)

    def enter(
        self, left: Left, norm: Tensor, readers: Sequence[tuple[Any, str]], step: Step, both: bool = True
    ) -> tuple[Any, Left]:
        """-> the block's input [T, D], as Ops.normed has it, and what is left here; its `y` is to be added.

        `readers`: weights that meet the input, and how they round it; `both`: some do not.
        """
        c = self.config
        entered = self.ops.enter(
            **left.take(),
            mixing=(self.fn, self.base, self.scale, c.norm_eps, c.hc_eps, c.sinkhorn_iters),
            norm=norm,
            both=both,
            readers=readers,
            wants_x=step.tap is not None,
        )
        left.see(entered.streams, step)
        if entered.x is not None:
            step.see(self.name, "x", entered.x)
            step.see(self.name, "gate", entered.gate)
            step.see(self.name, "comb", entered.comb)
        return entered.normed, Left(entered.streams, None, entered.gate, entered.comb, self)

    def head(self, streams: Tensor) -> Tensor:
        """streams [T, N, D] -> [T, D]; for the sites before a final norm."""
        c = self.config
        return self.ops.mhc.head(streams, self.fn, self.base, self.scale, c.norm_eps, c.hc_eps)
