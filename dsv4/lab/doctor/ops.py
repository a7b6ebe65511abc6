"""Every backend of every op against the reference, which is itself held to numbers recorded elsewhere.

A backend that is added to the kernel table is examined here without another line.
"""

from typing import Any

import torch
from torch import Tensor

from dsv4.lab.doctor.cases import Case, make_cases, to_device
from dsv4.lab.doctor.findings import Finding
from dsv4.lab.doctor.golden import FINGERPRINTS
from dsv4.ops import IMPLEMENTATIONS, Ops, backend_module
from dsv4.ops.activation import Norm
from dsv4.ops.mhc.cpu import Mixing, Residual
from dsv4.quant.codec import decode
from dsv4.quant.formats import QuantTensor


def examine_ops() -> list[Finding]:
    """The reference on the CPU first; then, on a GPU, every backend of the table, chosen there or not."""
    out = [_reference(op) for op in IMPLEMENTATIONS]
    if torch.cuda.is_available():
        out += examine_gpu()
    else:
        others = [f"{op}.{b}" for op, backends in IMPLEMENTATIONS.items() for b in backends if b != "cpu"]
        if others:
            text = f"no GPU: not examined: {', '.join(others)}"
            out.append(Finding("ops", "gpu backends", "note", text))
    return out


def examine_gpu() -> list[Finding]:
    pairs = [(op, backend) for op, backends in IMPLEMENTATIONS.items() for backend in backends]
    return [backend_finding(op, backend, "cuda") for op, backend in pairs]


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


def fingerprint(results: list[Tensor]) -> list[float]:
    """Length and one projection of each result: enough to notice a wrong one."""
    out = []
    for result in results:
        flat = result.double().flatten()
        wave = torch.cos(torch.arange(flat.numel(), dtype=torch.float64) * 0.7)
        out += [float(flat.norm()), float(flat @ wave)]
    return out


def fingerprints() -> dict[str, list[float]]:
    """What golden.py records."""
    cases = make_cases(torch.float32)
    return {f"{c.op}.{c.function} {c.name}": fingerprint(run(c, "cpu", "cpu")) for c in cases}


def _reference(op: str) -> Finding:
    name, cases = f"{op}.cpu", [case for case in make_cases(torch.float32) if case.op == op]
    for case in cases:
        key = f"{case.op}.{case.function} {case.name}"
        got, want = fingerprint(run(case, "cpu", "cpu")), FINGERPRINTS[key]
        bound = case.tolerance(torch.float32) * max(map(abs, want))
        if len(got) != len(want) or any(abs(g - w) > bound for g, w in zip(got, want, strict=True)):
            text = f"{case.function} ({case.name}) gives {_short(got)}, elsewhere it gave {_short(want)}"
            remedy = "this torch or CPU computes otherwise: install the pinned torch of requirements.txt"
            return Finding("ops", name, "fail", text, remedy)
    return Finding("ops", name, "ok", f"{len(cases)} cases as recorded")


def backend_finding(op: str, backend: str, device: str) -> Finding:
    """Against the reference on the CPU, with the activation type that the device would use."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    name = f"{op}.{backend}" if device == "cpu" else f"{op}.{backend} on {device}"
    cases = [case for case in make_cases(dtype) if case.op == op]
    worst = 0.0
    for case in cases:
        where = f"{case.function} ({case.name})"
        remedy = f"do not use it (--op {op}=cpu); report this line"
        try:
            got = run(case, backend, device)
        # A kernel that cannot be built raises whatever its compiler does; that is the finding.
        except Exception as error:  # noqa: BLE001
            return Finding("ops", name, "fail", f"{where} raised {type(error).__name__}: {error}", remedy)
        want = run(case, "cpu", "cpu")
        if problem := difference(got, want, case.tolerance(dtype)):
            return Finding("ops", name, "fail", f"{where}: {problem}", remedy)
        worst = max([worst, *(relative(g, w) for g, w in zip(got, want, strict=True))])
    return Finding("ops", name, "ok", f"{len(cases)} cases, relative error at most {worst:.1e}")


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


def _short(values: list[float]) -> str:
    return "[" + ", ".join(f"{value:.5g}" for value in values) + "]"
