"""One hyper-connection site: streams in, one vector out, and back."""

import torch
from torch import Tensor

from dsv4.model.bundle import Bundle


class HyperConnection:
    def __init__(self, b: Bundle, name: str) -> None:
        self.ops, self.config = b.ops, b.config
        self.fn = b.plain(f"{name}_fn").t().contiguous()  # [N*D, mixes]
        self.base = b.plain(f"{name}_base")
        scale, n = b.plain(f"{name}_scale"), b.config.num_streams
        # Stored once for each kind of mix: x, gate, comb; a head has the first only.
        counts = torch.tensor((n, n, n * n)[: len(scale)], device=scale.device)
        self.scale = scale.repeat_interleave(counts)

    def pre(self, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """streams [T, N, D] -> x [T, D], gate [T, N], comb [T, N, N]."""
        c = self.config
        return self.ops.mhc.pre(
            streams, self.fn, self.base, self.scale, c.norm_eps, c.hc_eps, c.sinkhorn_iters
        )

    def post(self, x: Tensor, streams: Tensor, gate: Tensor, comb: Tensor) -> Tensor:
        return self.ops.mhc.post(x, streams, gate, comb)

    def head(self, streams: Tensor) -> Tensor:
        """streams [T, N, D] -> [T, D]; for the sites before a final norm."""
        c = self.config
        return self.ops.mhc.head(streams, self.fn, self.base, self.scale, c.norm_eps, c.hc_eps)
