"""Where the GPU backends run in tests (a GPU, or Triton's interpreter), and stand-ins for tiles and top-k."""

import os
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from ops_support import check_close
from torch import Tensor

from dsv4.gpu import tiles
from dsv4.quant.codec import decode, encode_weight
from dsv4.quant.formats import Format, QuantTensor
from tests.support.interpreter import quicken

# Triton decides at import whether its functions are interpreted, so those run in a process of their own.
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
IS_GPU = not IS_INTERPRETED and torch.cuda.is_available()
DEVICE = "cuda" if IS_GPU else "cpu"
MARKS = [
    pytest.mark.skipif(
        not (IS_INTERPRETED or IS_GPU), reason="run by test_gpu_all, interpreted, or on a GPU"
    ),
    *([] if IS_INTERPRETED else [pytest.mark.gpu]),
]
SMALL = {
    "dsv4.ops.linear.prefill_gemm.TILE": (16, 32, 32, 4, 1),
    "dsv4.ops.experts.prefill_gemm.UP_TILE": (16, 32, 32, 4, 1),
    "dsv4.ops.experts.prefill_gemm.DOWN_TILE": (16, 64, 32, 4, 1),
    "dsv4.ops.attention.prefill.BLOCK": (16, 32, 4, 1),
    "dsv4.ops.index.prefill.BLOCK": (32, 64, 4, 1),
    "dsv4.ops.mhc.prefill.TILE": (16, 64, 4, 1),
}

if IS_INTERPRETED:
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    interpreted_dot = InterpreterBuilder.create_dot

    def wide_dot(self: Any, a: Any, b: Any, d: Any, *precision: Any) -> Any:
        """In float64: NumPy's float32 product shows a row's place in the tile on some CPUs."""
        if a.data.dtype != np.float32 or b.data.dtype != np.float32:
            return interpreted_dot(self, a, b, d, *precision)
        product = a.data.astype(np.float64) @ b.data.astype(np.float64) + d.data
        return TensorHandle(product.astype(d.data.dtype), d.dtype.scalar)

    InterpreterBuilder.create_dot = wide_dot

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])


@dataclass(frozen=True)
class StandIn:
    """What the backends ask of tiles.Tiled where there is no GPU to unpack tiles; values without factors."""

    format: Format
    shape: tuple[int, int]
    data: Tensor  # float32 [count, halves, N, K]
    factor: Tensor  # [count, halves]
    fits_bf16: bool

    @property
    def count(self) -> int:
        return self.data.shape[0]

    @property
    def halves(self) -> int:
        return self.data.shape[1]

    def span(self, first: int, stop: int) -> "StandIn":
        return replace(self, data=self.data[first:stop], factor=self.factor[first:stop])

    def rows(self, start: int, stop: int) -> "StandIn":
        assert self.count == self.halves == 1 and start % tiles.ROWS == 0
        return replace(self, data=self.data[:, :, start:stop], shape=(stop - start, self.shape[1]))


def _unpack(weight: StandIn, out: Tensor) -> None:
    assert out.is_contiguous() and out.numel() == weight.data.numel()
    assert out.dtype == torch.float32 or (out.dtype == torch.bfloat16 and weight.fits_bf16)
    out.copy_(weight.data.reshape(out.shape))


def _select(
    scores: Tensor,
    positions: Tensor,
    ratio: int,
    page_table: Tensor,
    slots: Tensor,
    page_entries: int,
    out: Tensor,
    overlap: bool,
    mixed: bool,
) -> None:
    out.fill_(-1)
    for t, count in enumerate(((positions + 1) // ratio).tolist()):
        best = torch.arange(count)
        if count > out.shape[1]:  # else there may be no scores
            order = scores[t, :count].sort(descending=True, stable=True).indices
            best = order[: out.shape[1]].sort().values
        pages = page_table[slots[t], best // page_entries]
        out[t, : len(best)] = pages * page_entries + (best % page_entries).int()


def use_stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    """What CUDA C++ does, where there is no GPU; and small tiles, which are interpreted faster."""
    if IS_GPU:
        return
    monkeypatch.setattr("dsv4.ops.linear.prefill_unpack.unpack", _unpack)
    monkeypatch.setattr("dsv4.ops.index.prefill.choose", _select)
    for name, tile in SMALL.items():
        monkeypatch.setattr(name, dict.fromkeys((torch.float32, torch.bfloat16), tile))


def _bank(groups: list[list[QuantTensor]]) -> Any:
    """Matrices, or pairs of them, as one tiled weight."""
    one = groups[0][0]
    if IS_GPU:
        bank = tiles.empty(one.format, one.shape, len(groups), len(groups[0]), DEVICE)
        fits = [tiles.put(bank, i, h, move(w)) for i, group in enumerate(groups) for h, w in enumerate(group)]
        return replace(bank, fits_bf16=all(f.bf16 for f in fits), fits_fp8=all(f.fp8 for f in fits))
    data = torch.stack([torch.stack([decode(replace(w, global_scale=1.0)) for w in g]) for g in groups])
    factor = torch.tensor([[w.global_scale for w in group] for group in groups])
    return StandIn(one.format, one.shape, data, factor, bool((data.bfloat16().float() == data).all()))


def tiled(q: QuantTensor) -> Any:
    """As the engine holds it: float32 has no tiles."""
    return _bank([[q]]) if q.format is not Format.F32 else q.data.to(DEVICE)


def tiled_bank(experts: list[tuple[QuantTensor, ...]]) -> SimpleNamespace:
    """w1, w3, w2 of every expert as one w13 and one w2."""
    return SimpleNamespace(
        w13=_bank([[w1, w3] for w1, w3, _ in experts]), w2=_bank([[w2] for *_, w2 in experts])
    )


def weight(values: Tensor, kind: str) -> QuantTensor:
    """A stored weight; `fp8f` has float scales that are no powers of two, so its values do not fit BF16."""
    if kind != "fp8f":
        return encode_weight(values, Format(kind))
    q = encode_weight(values, Format.FP8)
    assert q.scale is not None
    scale = torch.exp2(q.scale.float() - 127) * 1.2345678
    return QuantTensor(q.format, q.data, q.shape, scale)


def near(
    got: Tensor, want: Tensor, dtype: torch.dtype, what: str, ulps: float = 2.0, share: float = 2.0**-12
) -> None:
    """Within 1e-5 of the largest value; in BF16 within `share` of it and some units of each value's place."""
    assert got.dtype == want.dtype, (what, got.dtype, want.dtype)
    finite = want.float()[torch.isfinite(want.float())]
    largest = float(finite.abs().max()) if finite.numel() else 0.0
    bound = want.double().abs().nan_to_num() * (0.0 if dtype == torch.float32 else ulps * 2.0**-8)
    check_close(got.cpu(), want, bound + (1e-5 if dtype == torch.float32 else share) * largest, what)


def to(*tensors: Tensor) -> list[Tensor]:
    return [t.to(DEVICE) for t in tensors]


def move(q: QuantTensor) -> QuantTensor:
    return replace(q, data=q.data.to(DEVICE), scale=None if q.scale is None else q.scale.to(DEVICE))


def _mend_interpreter() -> None:
    """Triton 3.6's interpreter counts loops with int(array of one element), which numpy 2.4 refuses,
    multiplies the bits of BF16 numbers as if they were integers, and cuts float32 off to BF16."""
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    language = pytest.importorskip("triton.language")
    patch_tensor, create_dot = interpreter._patch_lang_tensor, interpreter.InterpreterBuilder.create_dot

    def patch(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    def widen(handle: Any) -> Any:
        if handle.dtype.scalar != language.bfloat16:
            return handle
        return interpreter.TensorHandle(
            (handle.data.astype("uint32") << 16).view("float32"), language.float32
        )

    convert = interpreter._convert_float

    def convert_float(data: Any, source: Any, target: Any, mode: Any) -> Any:
        if source == language.bfloat16 and target == language.float32:
            return data.astype("uint32") << 16
        if source == language.float32 and target == language.bfloat16:
            wide = torch.from_numpy(data.astype("float32"))
            return wide.bfloat16().view(torch.int16).numpy().view("uint16")
        return convert(data, source, target, mode)

    interpreter._convert_float = convert_float
    interpreter._patch_lang_tensor = patch
    interpreter.InterpreterBuilder.create_dot = lambda self, a, b, *rest: create_dot(
        self, widen(a), widen(b), *rest
    )


if IS_INTERPRETED:
    _mend_interpreter()
    quicken()
