"""One hyper-connection site: streams in, one vector out, and back."""

import torch
from torch import Tensor

from dsv4.model.bundle import Bundle
from dsv4.model.step import Step


def wide_scale(scale: Tensor, num_streams: int) -> Tensor:
    """A value for each mix, of scales stored once for each kind: x, gate, comb. A head has the first only."""
    n = num_streams
    counts = torch.tensor((n, n, n * n)[: len(scale)], device=scale.device)
    return scale.repeat_interleave(counts)


class HyperConnection:
    def __init__(self, b: Bundle, name: str) -> None:
        self.ops, self.config, self.name = b.ops, b.config, name
        self.fn = b.plain(f"{name}_fn").t().contiguous()  # [N*D, mixes]
        self.base = b.plain(f"{name}_base")
        self.scale = wide_scale(b.plain(f"{name}_scale"), b.config.num_streams)

    def pre(self, streams: Tensor, step: Step) -> tuple[Tensor, Tensor, Tensor]:
        """streams [T, N, D] -> x [T, D], gate [T, N], comb [T, N, N]."""
        c = self.config
        x, gate, comb = self.ops.mhc.pre(
            streams, self.fn, self.base, self.scale, c.norm_eps, c.hc_eps, c.sinkhorn_iters
        )
        step.see(self.name, "x", x)
        step.see(self.name, "gate", gate)
        step.see(self.name, "comb", comb)
        return x, gate, comb

    def post(self, x: Tensor, streams: Tensor, gate: Tensor, comb: Tensor, step: Step) -> Tensor:
        streams = self.ops.mhc.post(x, streams, gate, comb)
        step.see(self.name, "streams", streams)
        return streams

    def head(self, streams: Tensor) -> Tensor:
        """streams [T, N, D] -> [T, D]; for the sites before a final norm."""
        c = self.config
        return self.ops.mhc.head(streams, self.fn, self.base, self.scale, c.norm_eps, c.hc_eps)
