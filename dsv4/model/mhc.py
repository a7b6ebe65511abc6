"""One hyper-connection site: streams in, one vector out, and back."""

import torch
from torch import Tensor

from dsv4.model.bundle import Bundle
from dsv4.model.step import Step
from dsv4.ops.activation import Activation, Norm
from dsv4.ops.mhc.cpu import Mixing, Residual


def wide_scale(scale: Tensor, num_streams: int) -> Tensor:
    """A value for each mix, of scales stored once for each kind: x, gate, comb. A head has the first only."""
    n = num_streams
    counts = (n, n, n * n)[: len(scale)]
    return scale.repeat_interleave(torch.tensor(counts, device=scale.device), output_size=sum(counts))


class HyperConnection:
    def __init__(self, b: Bundle, name: str) -> None:
        c = b.config
        self.ops, self.name = b.ops, name
        self.mixing = Mixing(
            fn=b.plain(f"{name}_fn").t().contiguous(),  # [N*D, mixes]
            base=b.plain(f"{name}_base"),
            scale=wide_scale(b.plain(f"{name}_scale"), c.num_streams),
            norm_eps=c.norm_eps,
            eps=c.hc_eps,
            iters=c.sinkhorn_iters,
        )

    def mix_in(self, residual: Residual, norm: Norm, step: Step) -> Activation:
        """Mix the streams into one input [T, D], and normalise it."""
        normed, x = self.ops.mhc.mix_in(residual, self.mixing, norm, step.tap is not None)
        if x is not None:
            assert residual.streams is not None and residual.gate is not None and residual.comb is not None
            if residual.site:
                step.see(residual.site, "streams", residual.streams)
            step.see(self.name, "x", x)
            step.see(self.name, "gate", residual.gate)
            step.see(self.name, "comb", residual.comb)
        return normed

    def mix_out(self, y: Tensor, residual: Residual) -> None:
        """Add y [T, D] to the streams. The next site does it, or `close`: a GPU reads them once for both."""
        residual.y, residual.site = y, self.name

    def close(self, residual: Residual, step: Step) -> Tensor:
        """The streams [T, N, D] after the last block."""
        streams = residual.added(self.ops.mhc.post)
        if residual.site:
            step.see(residual.site, "streams", streams)
        return streams

    def head(self, streams: Tensor) -> Tensor:
        """streams [T, N, D] -> [T, D]; for the sites before a final norm."""
        head: Tensor = self.ops.mhc.head(streams, *self.mixing[:-1])
        return head
