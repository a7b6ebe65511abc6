"""The kernels' number formats agree with the codec bit for bit, at ties, ends and zeros too."""

import pytest
import torch
from step_support import DEVICE, rand, runs, there

from dsv4.ops.index.cpu import hadamard
from dsv4.quant import codec

triton = pytest.importorskip("triton", reason="Triton is not installed")
import triton.language as tl  # noqa: E402

from dsv4.gpu import numbers  # noqa: E402

pytestmark = runs
SIZE = 4096


@triton.jit
def _codes_kernel(x_ptr, e4m3_ptr, e2m1_ptr, power_ptr, act_ptr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    x = tl.load(x_ptr + at)
    tl.store(e4m3_ptr + at, numbers.e4m3_encode(x))
    tl.store(e2m1_ptr + at, numbers.e2m1_encode(x).to(tl.uint8))
    tl.store(power_ptr + at, numbers.p2ceil(tl.maximum(tl.abs(x), 2.0**-120)).to(tl.uint8))
    tl.store(act_ptr + at, numbers.to_act(x, tl.bfloat16))


@triton.jit
def _values_kernel(code_ptr, e4m3_ptr, e2m1_ptr, power_ptr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    code = tl.load(code_ptr + at)
    tl.store(e4m3_ptr + at, numbers.e4m3_decode(code))
    tl.store(e2m1_ptr + at, numbers.e2m1_decode(code.to(tl.int32) & 15))
    tl.store(power_ptr + at, numbers.power(code.to(tl.int32)))


@triton.jit
def _hadamard_kernel(x_ptr, out_ptr, D: tl.constexpr):
    at = tl.arange(0, D)
    tl.store(out_ptr + at, numbers.hadamard(tl.load(x_ptr + at), tl.float32))


def test_codes() -> None:
    """All midpoints between E4M3 and E2M1 values, the floats beside them, and random values of any size."""
    table = torch.cat(
        (codec.e4m3_decode(torch.arange(127, dtype=torch.uint8)), torch.tensor([5.0, 6.0, 7.0]))
    )
    marks = table.sort().values
    marks = torch.cat(
        (marks, (marks[1:] + marks[:-1]) / 2, torch.tensor(codec._E2M1_LAST), 2.0 ** torch.arange(-20, 20))
    )
    bits = marks.view(torch.int32)
    marks = torch.cat((marks, (bits + 1).view(torch.float32), (bits - 1).clamp(min=0).view(torch.float32)))
    rest = rand(SIZE - 2 * len(marks)) * 10.0 ** torch.linspace(-6, 6, SIZE - 2 * len(marks))
    x = torch.cat((marks, -marks, rest))
    bytes_ = [torch.zeros(SIZE, dtype=torch.uint8, device=DEVICE) for _ in range(3)]
    act = torch.zeros(SIZE, dtype=torch.bfloat16, device=DEVICE)
    _codes_kernel[(1,)](there(x), *bytes_, act, SIZE=SIZE)
    assert torch.equal(bytes_[0].cpu(), codec.e4m3_encode(x))
    assert torch.equal(bytes_[1].cpu(), codec.e2m1_encode(x))
    assert torch.equal(bytes_[2].cpu(), codec.p2ceil_code(x.abs().clamp(min=2.0**-120)))
    assert torch.equal(act.cpu(), x.bfloat16())


def test_values() -> None:
    code = torch.arange(256, dtype=torch.uint8)
    e4m3, e2m1, power = (torch.zeros(256, device=DEVICE) for _ in range(3))
    _values_kernel[(1,)](there(code), e4m3, e2m1, power, SIZE=256)
    known = (code & 127) != 127 if DEVICE == "cpu" else code >= 0  # the interpreter takes NaN for 480
    assert torch.equal(e4m3.cpu()[known].nan_to_num(1e9), codec.e4m3_decode(code)[known].nan_to_num(1e9))
    assert torch.equal(e2m1.cpu(), codec.e2m1_decode(code & 15))
    assert torch.equal(power.cpu()[1:].nan_to_num(1e9), codec.e8m0_decode(code)[1:].nan_to_num(1e9))


def test_codes_of_nan() -> None:
    x = torch.tensor([float("nan"), -float("nan"), float("inf"), -float("inf")]).repeat(SIZE // 4)
    bytes_ = [torch.zeros(SIZE, dtype=torch.uint8, device=DEVICE) for _ in range(3)]
    _codes_kernel[(1,)](there(x), *bytes_, torch.zeros(SIZE, dtype=torch.bfloat16, device=DEVICE), SIZE=SIZE)
    # The sign of a NaN says nothing.
    assert torch.equal(bytes_[0].cpu() & 127, codec.e4m3_encode(x) & 127)
    assert torch.equal(bytes_[1].cpu() & 7, codec.e2m1_encode(x) & 7)


def test_hadamard() -> None:
    """The additions in the reference's order: equal, not close."""
    for steps in (5, 7):
        x = rand(1 << steps, seed=steps)
        out = torch.zeros(1 << steps, device=DEVICE)
        _hadamard_kernel[(1,)](there(x), out, D=1 << steps)
        assert torch.equal(out.cpu(), hadamard(x))
