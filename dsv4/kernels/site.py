"""Launches mhc.cu: one hyper-connection site of a decode step."""

import ctypes

import torch
from torch import Tensor

from dsv4.kernels.build import call


class _Site(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("y", "gate", "comb", "streams", "fn", "base", "scale")),
        *((name, ctypes.c_void_p) for name in ("norm", "x")),
        *((name, ctypes.c_int) for name in ("d", "parts", "mixes", "iters", "y_is_float")),
        *((name, ctypes.c_float) for name in ("norm_eps", "eps")),
    )


class Site:
    """streams [T, 4, D] take in y [T, P, D] (summed over P; None: nothing) with gate [T, 4] and comb [T, 4, 4] of
    the last site; then x [T, D], gate and comb of this one. fn [M, 4*D], base and scale [M], norm [D] float32; with
    M = 4 there is no gate and comb: the head's form.
    """

    def __init__(
        self,
        y: Tensor | None,
        gate: Tensor,
        comb: Tensor,
        streams: Tensor,
        fn: Tensor,
        base: Tensor,
        scale: Tensor,
        norm: Tensor,
        x: Tensor,
        norm_eps: float,
        eps: float,
        iters: int,
    ) -> None:
        self.rows, n, d = streams.shape
        self.is_float, self.device = streams.dtype == torch.float32, streams.device
        assert n == 4 and fn.shape[1] == n * d and x.dtype == streams.dtype, (streams.shape, fn.shape)
        assert y is None or (y.is_contiguous() and y.shape[::2] == (self.rows, d)), y.shape
        tensors = (y, gate, comb, streams, fn, base, scale, norm, x)
        self.keep = tensors
        self.params = _Site(
            *(None if t is None else t.data_ptr() for t in tensors),
            *(d, 1 if y is None else y.shape[1], fn.shape[0], iters),
            *(int(y is not None and y.dtype == torch.float32), norm_eps, eps),
        )

    def launch(self) -> None:
        call("mhc", "site", self.device, ctypes.byref(self.params), self.rows, int(self.is_float))
