"""Compares the backends of ops with the reference, on the inputs of cases.py.

A backend that is added to the kernel table is compared too, without another line.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from dsv4.ops import IMPLEMENTATIONS, Ops, backend_module
from dsv4.ops.activation import Norm
from dsv4.ops.cases import Case, make_cases, to_device
from dsv4.ops.mhc.cpu import Mixing, Residual
from dsv4.quant.codec import decode
from dsv4.quant.formats import QuantTensor


class Verdict(NamedTuple):
    """A backend beside the reference. `problem`: "" where all cases agree; `text`: how closely."""

    name: str
    problem: str = ""
    text: str = ""


def compare_all(device: str) -> list[Verdict]:
    """Every backend of the table, chosen on this machine or not."""
    return [compare(op, backend, device) for op, backends in IMPLEMENTATIONS.items() for backend in backends]


def compare(op: str, backend: str, device: str) -> Verdict:
    """Against the reference on the CPU, with the activation type that the device would use."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    name = f"{op}.{backend}" if device == "cpu" else f"{op}.{backend} on {device}"
    cases = [case for case in make_cases(dtype) if case.op == op]
    worst = 0.0
    for case in cases:
        where = f"{case.function} ({case.name})"
        try:
            got = run(case, backend, device)
        # A kernel that cannot be built raises whatever its compiler does; that is the finding.
        except Exception as error:  # noqa: BLE001
            return Verdict(name, f"{where} raised {type(error).__name__}: {error}")
        want = run(case, "cpu", "cpu")
        if problem := difference(got, want, case.tolerance(dtype)):
            return Verdict(name, f"{where}: {problem}")
        worst = max([worst, *(relative(g, w) for g, w in zip(got, want, strict=True))])
    return Verdict(name, text=f"{len(cases)} cases, relative error at most {worst:.1e}")


def outputs(result: Any) -> list[Tensor]:
    """Whatever an op returns: values as float64, ids and rows as int64."""
    if isinstance(result, tuple):
        return [tensor for part in result for tensor in outputs(part)]
    if isinstance(result, QuantTensor):
        return [decode(result).double().cpu()]
    result = torch.as_tensor(result).cpu()
    return [result.double() if result.is_floating_point() else result.long()]


def run(case: Case, backend: str, device: str) -> list[Tensor]:
    """A backend whose weights are not QuantTensors exports hold(weight: QuantTensor, device) to make them."""
    holder = "linear" if case.function == "mix_in" else case.op
    hold = getattr(backend_module(holder, backend), "hold", None)
    return outputs(call(case.op, case.function, backend, to_device(case.arguments, device, hold)))


def call(op: str, function: str, backend: str, arguments: tuple[Any, ...]) -> Any:
    """A function of an op's backend; `mix_in` is of several ops, all of that backend."""
    if function == "mix_in":
        return _mix_in(backend, *arguments)
    return getattr(backend_module(op, backend), function)(*arguments)


def _mix_in(
    backend: str,
    last: tuple[Tensor, Tensor, Tensor, Tensor],
    mixing: tuple[Any, ...],
    weight: Tensor,
    readers: list[tuple[Any, str]],
    multiplies: bool = True,
) -> tuple[Tensor | None, ...]:
    """And the products of its input with what reads it, which alone know what form it has."""
    ops = Ops.choose("cpu", **dict.fromkeys(IMPLEMENTATIONS, backend))
    site, (y, streams, gate, comb) = Mixing(*mixing), last
    forms = [ops.linear.form(streams.dtype, held, how) for held, how in readers]
    residual = Residual(streams, y, gate, comb)
    made, _ = ops.mhc.mix_in(residual, site, Norm(weight, site.norm_eps, tuple(forms)))
    products = [ops.linear.linear(made, held, how) for held, how in readers] if multiplies else []
    return (residual.streams, residual.gate, residual.comb, *products)


def difference(got: list[Tensor], want: list[Tensor], tolerance: float) -> str:
    """What is wrong, or nothing."""
    if [g.shape for g in got] != [w.shape for w in want]:
        return f"shapes {[list(g.shape) for g in got]}, expected {[list(w.shape) for w in want]}"
    for g, w in zip(got, want, strict=True):
        if not w.is_floating_point():
            if not torch.equal(g, w):
                return f"{int((g != w).sum())} of {w.numel()} choices differ from the reference's"
            continue
        if not bool(torch.isfinite(g).all()):
            return "NaN or infinity, where the reference has none"
        if (error := relative(g, w)) > tolerance:
            return f"relative error {error:.1e} against the reference, expected at most {tolerance:.1e}"
    return ""


def relative(got: Tensor, want: Tensor) -> float:
    got, want = got.double(), want.double()
    scale = float(want.norm())
    return float((got - want).norm()) / scale if scale else float(got.norm())
